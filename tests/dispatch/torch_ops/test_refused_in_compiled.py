"""What an op refuses within torch.compile(fullgraph=True): the words of BadRequest stand in Dynamo's error."""

import pickle

import pytest

torch = pytest.importorskip("torch")

import dispatch.torch as dt  # noqa: E402  # needs torch
from dispatch.errors import BadRequest  # noqa: E402

CALLS = {
    "linear": (lambda x: dt.linear(x, torch.ones(5, 7)), ("weight", "shape (5, 7)", "(out, 8), for x (4, 8)")),
    "norm": (lambda x: dt.rms_norm(x, (8,), torch.ones(7)), ("weight", "shape (7,)", "(8,), the normalized_shape")),
    "mixed": (
        lambda x: dt.linear(x, torch.ones(5, 8, dtype=torch.float16)),
        ("weight", "a tensor of torch.float16", "torch.float32, the dtype of x", "torch.autocast"),
    ),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.filterwarnings("ignore")
def test_the_words_are_in_the_message(name):
    call, words = CALLS[name]
    x = torch.ones(4, 8)
    with pytest.raises(BadRequest) as caught:
        call(x)
    assert all(word in str(caught.value) for word in words)
    torch._dynamo.reset()
    with pytest.raises(Exception, match="BadRequest") as compiled:
        torch.compile(call, fullgraph=True, backend="eager")(x)
    assert all(word in str(compiled.value) for word in words)


def test_the_error_itself_stays_what_it_was():
    error = BadRequest("x", "one", "two", "three")
    assert str(error) == "x: got one; expected two. Hint: three"
    assert error.args == (str(error),)
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.hint) == (str(error), "three")
