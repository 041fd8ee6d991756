// What the host pays for one cublasLtMatmul when nothing stands between it and the library: a loop in C.
// The function and all its arguments come from the caller, so that the loop runs the very library, descriptors and
// algorithm that the other candidates run; this file needs no header and links to nothing. `graph_loop` is the same for
// a captured call: a loop over cuGraphLaunch.
#include <cstddef>

typedef int (*cublasLtMatmul_t)(void *handle, void *desc, const void *alpha, const void *a, void *a_layout,
                                const void *b, void *b_layout, const void *beta, const void *c, void *c_layout,
                                void *d, void *d_layout, const void *algo, void *workspace,
                                std::size_t workspace_bytes, void *stream);

// Calls the function so many times; stops at the first status that is not success and returns it.
extern "C" int cublaslt_loop(int calls, cublasLtMatmul_t matmul, void *handle, void *desc, const void *alpha,
                             const void *a, void *a_layout, const void *b, void *b_layout, const void *beta,
                             const void *c, void *c_layout, void *d, void *d_layout, const void *algo,
                             void *workspace, std::size_t workspace_bytes, void *stream) {
    for (int call = 0; call < calls; ++call) {
        int status = matmul(handle, desc, alpha, a, a_layout, b, b_layout, beta, c, c_layout, d, d_layout, algo,
                            workspace, workspace_bytes, stream);
        if (status != 0) return status;
    }
    return 0;
}

typedef int (*cuGraphLaunch_t)(void *executable, void *stream);

extern "C" int graph_loop(int calls, cuGraphLaunch_t launch, void *executable, void *stream) {
    for (int call = 0; call < calls; ++call) {
        int status = launch(executable, stream);
        if (status != 0) return status;
    }
    return 0;
}
