"""The CPU's compiled operations give what their torch references give, at odd sizes too."""

import shutil

import pytest
import torch

from sluice.kernels import (
    accumulators,
    attention,
    compressor,
    cpu,
    dense_attention,
    hyper_connections,
    indexer,
    matmul,
    moe,
    norm,
    rope,
    rows,
    topk,
)

pytestmark = pytest.mark.skipif(
    not any(map(shutil.which, cpu.COMPILERS)), reason="no C++ compiler on this machine"
)
FEW = pytest.mark.parametrize("n", [1, 3, 8, 13, 16])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def close(actual, expected):
    tolerance = 2e-2 if expected.dtype == torch.bfloat16 else 2e-4
    assert actual.dtype == expected.dtype
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def in_torch(monkeypatch, run):
    with monkeypatch.context() as patched:
        patched.setattr(cpu, "_library", lambda: None)
        return run()


def pool(*row_shape, dtype=torch.float32):
    """A layer's view [7, 5, *row_shape]; the null page is NaN."""
    tensor = torch.randn(7, 3, 5, *row_shape).to(dtype)
    tensor[0] = torch.nan
    return tensor[:, 1]


def slots(*shape):
    listed = torch.randint(5, 35, shape)
    return torch.where(torch.rand(shape) < 0.8, listed, -1)


def test_the_library_compiles():
    assert cpu.compiled(torch.ones(1))


def test_without_a_compiler_the_references_run_and_the_log_says_so(monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(cpu, "FOLDER", tmp_path)
    monkeypatch.setattr(cpu, "COMPILERS", ("no-such-compiler",))
    library = cpu._library.__wrapped__()
    monkeypatch.setattr(cpu, "_library", lambda: library)
    assert not cpu.compiled(torch.ones(1))
    assert "none of no-such-compiler is installed" in caplog.text


@FEW
@DTYPES
@pytest.mark.parametrize("out, channels", [(1, 16), (37, 50), (130, 7)])
def test_linear(n, dtype, out, channels):
    x, weight = torch.randn(n, channels).to(dtype), torch.randn(out, channels).to(dtype)
    close(matmul.linear(x, weight), matmul.linear_reference(x, weight))
    close(matmul.linear(x[:, : channels // 2], weight[:, : channels // 2].contiguous()),
          matmul.linear_reference(x[:, : channels // 2], weight[:, : channels // 2]))  # fmt: skip


@FEW
@DTYPES
def test_batched_linear(n, dtype):
    x, weight = torch.randn(n, 3, 20).to(dtype), torch.randn(3, 9, 20).to(dtype)
    close(matmul.batched_linear(x, weight), torch.einsum("ngi,goi->ngo", x, weight))


@FEW
@DTYPES
def test_experts(n, dtype, monkeypatch):
    x, w13, w2 = torch.randn(n, 20), torch.randn(5, 14, 20) / 4, torch.randn(5, 20, 7) / 4
    x, w13, w2 = x.to(dtype), w13.to(dtype), w2.to(dtype)
    gate, by, ids = torch.randn(5, 20), torch.randn(5), torch.arange(n)
    table = torch.randint(0, 5, (n, 2))
    for choice in (by, table):
        arguments = (x, gate, choice, ids, 2, 1.5)
        experts, weights = moe.choose_experts(*arguments)
        expected = in_torch(monkeypatch, lambda a=arguments: moe.choose_experts(*a))
        assert torch.equal(experts, expected[0])
        close(weights, expected[1])
        run = lambda e=experts, w=weights: moe.routed_experts(x, e, w, w13, w2, 1.0)  # noqa: E731
        torch.testing.assert_close(run(), in_torch(monkeypatch, run), rtol=0.05, atol=0.05)
    run = lambda: moe.mlp(x, w13[0], w2[0], 1.0)  # noqa: E731
    close(run(), in_torch(monkeypatch, run))


@FEW
@DTYPES
@pytest.mark.parametrize("dim, num_heads", [(24, 1), (48, 11)])
def test_sparse_attention(n, dtype, dim, num_heads, monkeypatch):
    sources = [(pool(dim, dtype=dtype), slots(n, count)) for count in (9, 37)]
    sources[0][1][:, 0] = 7  # every query has a row
    rotation = rope.rotations(torch.arange(n), rope.inverse_frequencies(100.0, 8))
    queries, sinks = torch.randn(n, num_heads, dim).to(dtype), torch.randn(num_heads)
    for used in (sources, sources[:1]):
        expected = attention.sparse_attention_reference(queries, used, sinks, 0.3, rotation)
        close(attention.sparse_attention(queries, used, sinks, 0.3, rotation), expected)


@FEW
@DTYPES
def test_decode_attention(n, dtype):
    kv, queries = pool(2, 2, 24, dtype=dtype), torch.randn(n, 6, 24).to(dtype)
    pages, num_tokens = torch.randint(1, 7, (n, 4)), torch.randint(1, 21, (n,))
    arguments = (queries, kv, pages, num_tokens, 0.2)
    expected = dense_attention.decode_attention_reference(*arguments)
    close(dense_attention.decode_attention(*arguments), expected)


@FEW
@DTYPES
def test_index_scores_and_topk(n, dtype):
    keys, queries, weights = pool(24, dtype=dtype), torch.randn(n, 11, 24), torch.randn(n, 11)
    listed, visible = torch.randint(5, 35, (n, 29)), torch.randint(0, 30, (n,))
    arguments = (queries.to(dtype), weights, keys, listed, torch.arange(n + 1))
    scores = indexer.index_scores(*arguments)
    close(scores, indexer.index_scores_reference(*arguments))
    scores = scores.round()  # ties
    chosen = topk.causal_topk(scores, visible, 6)
    assert torch.equal(chosen, topk.causal_topk_reference(scores, visible, 6))


@FEW
@DTYPES
def test_norm_and_rotation(n, dtype, monkeypatch):
    x, weight = torch.randn(n, 3, 90).to(dtype)[..., :70], torch.randn(70)
    rotation = rope.rotations(torch.arange(n) * 1000, rope.inverse_frequencies(100.0, 6))
    run = lambda: rope.rotations(torch.arange(n) * 1000, rope.inverse_frequencies(100.0, 6))  # noqa: E731
    torch.testing.assert_close(rotation, in_torch(monkeypatch, run), rtol=1e-5, atol=1e-5)
    for turn in (rotation, rotation.conj()):
        expected = norm.norm_and_rotate_reference(x, weight, 1e-6, turn)
        close(norm.norm_and_rotate(x, weight, 1e-6, turn), expected)
        expected = rope.rotate_reference_(x.clone(), turn)
        close(rope.rotate_(x.clone(), turn), expected)
    close(norm.rms_norm(x, None, 1e-6), norm.rms_norm_reference(x, None, 1e-6))


@FEW
@DTYPES
def test_hyper_connections(n, dtype):
    streams, output = torch.randn(n, 3, 20).to(dtype), torch.randn(n, 20).to(dtype)
    weights = torch.randn(15, 60) / 8, torch.randn(15), torch.randn(15)
    eps = {"eps": 1e-6, "norm_eps": 1e-6}
    mixed = hyper_connections.mix_in(streams, *weights, sinkhorn_iters=5, **eps)
    expected = hyper_connections.mix_in_reference(streams, *weights, sinkhorn_iters=5, **eps)
    for one, other in zip(mixed, expected, strict=True):
        close(one, other)
    close(hyper_connections.mix_out(output, streams, *expected[1:]),
          hyper_connections.mix_out_reference(output, streams, *expected[1:]))  # fmt: skip
    head = weights[0][:3], weights[1][:1], weights[2][:3]
    close(hyper_connections.collapse_head(streams, *head, **eps),
          hyper_connections.collapse_head_reference(streams, *head, **eps))  # fmt: skip


def test_compressors():
    raw, overlapping = pool(2, 9), pool(2, 18)
    listed = slots(6, 8)
    listed[2] = -1
    close(compressor.compress_raw(raw, listed), compressor.compress_raw_reference(raw, listed))
    close(compressor.compress_overlapping(overlapping, listed),
          compressor.compress_overlapping_reference(overlapping, listed))  # fmt: skip
    blocks, block_of_token = torch.tensor([7, -1, 12]), torch.tensor([0, 0, 1, 2, 2])
    arguments = (pool(3, 9), blocks, block_of_token, *torch.randn(2, 5, 9))
    expected = accumulators.accumulate_blocks_reference(*arguments)
    close(accumulators.accumulate_blocks(*arguments), expected)


@DTYPES
def test_rows_and_their_slots(dtype, monkeypatch):
    one, other = pool(2, 9, dtype=dtype), pool(2, 9, dtype=dtype)
    other.copy_(one)
    listed, values = torch.tensor([7, -1, 33]), torch.randn(3, 2, 9)
    rows.write_rows(one, listed, values)
    rows.write_rows_reference(other, listed, values)
    assert torch.equal(one[1:], other[1:])
    tokens, request = torch.randint(16, 48, (3, 5)), torch.tensor([[0], [2], [1]])
    table, first = torch.randint(1, 9, (3, 4)), torch.tensor([0, 1, 2])
    for firsts, valid in ((None, None), (first, tokens % 3 > 0)):
        run = lambda f=firsts, v=valid: rows.page_slots(  # noqa: E731
            tokens, request, v, table, f, tokens_per_page=16, tokens_per_row=4
        )
        assert torch.equal(run(), in_torch(monkeypatch, run))


def test_a_nan_among_scores_is_chosen_and_no_place_is_left_open():
    scores, num_visible = torch.randn(3, 40), [40, 30, 21]
    scores[:, ::3] = torch.nan
    choices = topk.causal_topk(scores, torch.tensor(num_visible), 20).tolist()
    for chosen, visible in zip(choices, num_visible, strict=True):
        assert chosen == sorted(set(chosen))
        assert set(range(0, visible, 3)) <= set(chosen) <= set(range(visible))
