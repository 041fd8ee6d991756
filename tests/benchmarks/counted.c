/* Functions that do nothing with 0, 5, 10 and 16 arguments: what is left of a call is its price. bench_bindings builds it. */
#include <stddef.h>

static int last = -1;

int countedVersion(int *value) { *value = 1; return 0; }
int countedLast(void) { return last; }
int counted0(void) { last = 0; return 0; }

/* The arguments are of the kinds that cublasLtMatmul has: it is the 16 of them. */
int counted5(void *a, void *b, const void *c, const void *d, void *e) { last = 5; return 0; }
int counted10(void *a, void *b, const void *c, const void *d, void *e, const void *f, void *g, int h, size_t i, void *j) {
  last = 10;
  return 0;
}
int counted16(void *a, void *b, const void *c, const void *d, void *e, const void *f, void *g, const void *h, const void *i,
              void *j, void *k, void *l, const void *m, void *n, size_t o, void *p) {
  last = 16;
  return 0;
}
