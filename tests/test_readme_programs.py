"""Programs as somebody writes them who has read README and its pages; and their longer examples, as they stand."""

import re
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import dispatch as dp

ROOT = Path(__file__).parents[1]


def example(heading: str, page: str = "README.md") -> str:
    """The first piece of Python below a heading of a page."""
    text = (ROOT / page).read_text(encoding="utf-8")
    _, found, below = text.partition(f"\n{heading}\n")
    assert found, heading
    block = re.search(r"^```python\n(.*?)^```", below, re.DOTALL | re.MULTILINE)
    assert block
    above = text.count("\n", 0, len(text) - len(below) + block.start(1))  # so that a traceback shows the page's lines
    return "\n" * above + block[1]


def run(program: str, **names: object) -> dict[str, object]:
    module = ModuleType("readme_program")
    vars(module).update(names)
    sys.modules["readme_program"] = module  # dataclasses look their module up
    try:
        exec(compile(program, "README.md", "exec"), vars(module))
    finally:
        del sys.modules["readme_program"]
    return vars(module)


@pytest.fixture
def table():
    """Rows that are registered meanwhile leave the table again."""
    before = list(dp.TABLE)
    yield
    for row in [row for row in dp.TABLE if row not in before]:
        dp.TABLE.unregister(row)


def test_an_fp8_product_with_its_gelu_and_what_it_is_of_on_torch():
    torch = pytest.importorskip("torch")
    found = run(example("### Arrays of torch, NumPy, JAX and CuPy"), dp=dp)
    a, b, bias, d, x = (found[name] for name in ("a", "b", "bias", "d", "x"))
    assert type(d) is type(x) is torch.Tensor
    right = a.float() @ b.float() + bias.float()
    torch.testing.assert_close(x.float(), right, rtol=2**-7, atol=2**-7)
    torch.testing.assert_close(d.float(), torch.nn.functional.gelu(right, approximate="tanh"), rtol=2**-7, atol=2**-7)


def test_an_fp8_product_at_the_first_attempt_is_told_how_b_must_lie():
    torch = pytest.importorskip("torch")
    a, b = (torch.ones(32, 32).to(torch.float8_e4m3fn) for _ in "ab")
    with pytest.raises(dp.errors.NoRow, match=r"make it as b\.mT\.contiguous\(\)\.mT") as caught:
        dp.matmul(a, b)
    (advice,) = {*re.findall(r"make it as (b\.[\w.()]+)", str(caught.value))}
    d = dp.matmul(a, eval(advice, {"b": b}))
    assert d.dtype is torch.bfloat16
    assert d.unique().tolist() == [32]


@pytest.mark.usefixtures("table")
def test_an_op_of_ones_own():
    found = run(example("## Extending"))
    clamp, request_class = found["clamp"], found["ClampRequest"]
    dev = dp.device("host")
    x = np.linspace(-9, 9, 50, dtype=np.float32)
    np.testing.assert_array_equal(clamp(dev.array(x)).numpy(), np.minimum(x, 6))
    np.testing.assert_array_equal(clamp(x, 2.5), np.minimum(x, np.float32(2.5)))  # an array of NumPy's, and one back
    assert dp.prepare(request_class(dev.array(x)))().numpy().max() == 6
    with dp.Supervisor("host") as sup:
        assert sup.submit(request_class(dev.array(x), 1.0)).result(60).numpy().max() == 1
    with pytest.raises(dp.errors.BadRequest, match="C order"):
        clamp(dev.zeros((3, 4)).T)
    try:
        assert found["kernel"].cubin("sm_90")[:4] == b"\x7fELF"
    except dp.errors.Refused as refusal:
        pytest.skip(f"NVRTC is not installed: {refusal}")


def test_a_service_in_asyncio():
    program = """
import asyncio

import numpy as np

import dispatch as dp


async def main() -> int:
    rng = np.random.default_rng(0)
    w = rng.standard_normal((64, 32), dtype=np.float32)
    async with await asyncio.to_thread(dp.Supervisor, "host", streams=2, when_full="raise") as sup:

        async def answer(reader, writer):
            x = np.frombuffer(await reader.readexactly(64 * 4), np.float32).reshape(1, 64)
            y = await sup.submit(dp.MatmulRequest(a=x, b=w), timeout=60)
            writer.write(y.tobytes())
            await writer.drain()
            writer.close()

        async def ask(x):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(x.tobytes())
            y = np.frombuffer(await reader.readexactly(32 * 4), np.float32)
            writer.close()
            await writer.wait_closed()
            np.testing.assert_allclose(y, x @ w, rtol=1e-4, atol=1e-4)

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server:
            await asyncio.gather(*(ask(rng.standard_normal(64, dtype=np.float32)) for _ in range(20)))
    return sup.stats().done


done = asyncio.run(main())
"""
    assert run(program)["done"] == 20


def test_the_example_in_asyncio(capsys):
    program = example("## In asyncio", "docs/supervisor.md").replace('"cuda:0"', '"host"') + "\nasyncio.run(main())\n"
    run("import asyncio\n" + program.removeprefix("\n"), dp=dp, x=np.eye(3, dtype=np.float32))
    assert capsys.readouterr().out.startswith("[[1. 0. 0.]")


def test_arguments_that_torch_names_otherwise_do_what_readme_says():
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 8, 16, dtype=torch.float16) for _ in range(3))
    causal = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(dp.sdpa_fwd(q, k, v, right_bound=0), causal, rtol=5e-3, atol=5e-3)
    x, w = torch.randn(1, 3, 6, 6), torch.randn(2, 3, 3, 3)
    torch.testing.assert_close(dp.conv_fwd(x, w, pad=1), torch.conv2d(x, w, padding=1), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(dp.softmax(x, axis=1), torch.softmax(x, dim=1))
    torch.testing.assert_close(dp.reduce(x, axes=1), x.sum(dim=1))
