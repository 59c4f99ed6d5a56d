"""Work of the kernels inside a layer: formats, norms, mixing, experts; and of the draw."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from sluice.benchmarks.gpu_work import (
    Shape,
    Work,
    num_bytes_of,
    rounding,
    row_formats,
    spread,
)
from sluice.cache.row_format import RowFormat
from sluice.kernels import codes, formats
from sluice.kernels.hadamard import rotate_channels
from sluice.kernels.hyper_connections import mix_in, mix_out
from sluice.kernels.matmul import BlockScaled, Weight, grouped_linear, linear, quantise
from sluice.kernels.moe import swiglu
from sluice.kernels.norm import norm_and_rotate, rms_norm
from sluice.kernels.rope import inverse_frequencies, rotate_, rotations
from sluice.kernels.sampling import draw_tokens

EPS, STREAMS, SINKHORN_ITERS, LIMIT = 1e-6, 4, 20, 10.0


def layer_work(shape: Shape) -> Iterator[Work]:
    for form in row_formats(shape).values():
        yield _pack(shape, form)
        yield _unpack(shape, form)
    yield _hadamard(shape)
    yield _norm(shape)
    yield _norm_rotate(shape)
    yield _rotate(shape)
    for label, num_tokens in (("decode", shape.batch), ("prompt", shape.chunk)):
        yield _mix_in(shape, label, num_tokens)
        yield _mix_out(shape, label, num_tokens)
        yield _fp8_linear(shape, label, num_tokens)
        for kind in ("plain", "fp4"):
            yield _experts(shape, label, num_tokens, kind)
    yield _quantise(shape)
    yield _swiglu(shape)
    yield _draw(shape)


def _random(*size: int, shape: Shape, scale: float = 1.0) -> Tensor:
    return (torch.randn(*size) * scale).to(shape.dtype)


def _pack(shape: Shape, form: RowFormat) -> Work:
    """The reference is held to a search in float64 by tests/kernels/test_formats.py."""
    x = _random(shape.chunk, form.dim, shape=shape, scale=30)
    return Work(
        "pack_rows", form.name, lambda: formats.pack(x, form),
        lambda: formats.pack_reference(x, form), tolerance=0,
        num_bytes=num_bytes_of(x) + shape.chunk * form.row_bytes,
    )  # fmt: skip


def _unpack(shape: Shape, form: RowFormat) -> Work:
    rows = formats.pack_reference(_random(shape.chunk, form.dim, shape=shape, scale=30), form)
    num_bytes = num_bytes_of(rows) + shape.chunk * form.dim * shape.element_bytes
    return Work(
        "unpack_rows", form.name, lambda: formats.unpack(rows, form, shape.dtype),
        lambda: formats.unpack_reference(rows, form, torch.float32), 0, num_bytes,
    )  # fmt: skip


def _hadamard(shape: Shape) -> Work:
    x = _random(shape.chunk * shape.index_heads, shape.index_dim, shape=shape)
    sample = spread(len(x))

    def expected() -> Tensor:
        matrix = torch.ones(1, 1, dtype=torch.float64)
        while len(matrix) < shape.index_dim:
            matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
        return x[sample].double() @ matrix / shape.index_dim**0.5

    return Work(
        "rotate_channels", "prompt", lambda: rotate_channels(x), expected,
        tolerance=rounding(shape), num_bytes=2 * num_bytes_of(x), sample=sample,
    )  # fmt: skip


def _normed(x: Tensor, weight: Tensor | float) -> Tensor:
    return x.double() * (x.double().square().mean(-1, keepdim=True) + EPS).rsqrt() * weight


def _norm(shape: Shape) -> Work:
    x, weight = _random(shape.chunk, shape.hidden, shape=shape), torch.randn(shape.hidden)
    return Work(
        "norm_rotate", "hidden", lambda: rms_norm(x, weight, EPS), lambda: _normed(x, weight),
        tolerance=rounding(shape), num_bytes=2 * num_bytes_of(x),
    )  # fmt: skip


def _turns(shape: Shape, num_tokens: int) -> Tensor:
    return rotations(torch.arange(num_tokens) * 5, inverse_frequencies(1e4, shape.rope_dim))


def _turned(x: Tensor, turns: Tensor) -> Tensor:
    """fp64 [n, heads, dim] with the last channels turned."""
    x, tail = x.double().clone(), x[..., -2 * turns.shape[1] :].double().unflatten(-1, (-1, 2))
    pairs = torch.view_as_complex(tail.contiguous()) * turns.to(torch.complex128)[:, None]
    x[..., -2 * turns.shape[1] :] = torch.view_as_real(pairs).flatten(-2)
    return x


def _norm_rotate(shape: Shape) -> Work:
    x = _random(shape.chunk, shape.num_heads, shape.head_dim, shape=shape)
    turns, sample = _turns(shape, shape.chunk), spread(shape.chunk)
    return Work(
        "norm_rotate", "queries", lambda: norm_and_rotate(x, None, EPS, turns),
        lambda: _turned(_normed(x[sample], 1.0), turns[sample]),
        tolerance=rounding(shape), num_bytes=2 * num_bytes_of(x), sample=sample,
    )  # fmt: skip


def _rotate(shape: Shape) -> Work:
    """In place: only the first call is checked."""
    x = _random(shape.chunk, shape.index_heads, shape.index_dim, shape=shape)
    turns, sample = _turns(shape, shape.chunk), spread(shape.chunk)
    before = x[sample].clone()
    return Work(
        "rotate", "index queries", lambda: rotate_(x, turns),
        lambda: _turned(before, turns[sample]), tolerance=rounding(shape),
        num_bytes=2 * num_bytes_of(x[..., : shape.rope_dim]), sample=sample,
    )  # fmt: skip


def _mix_in(shape: Shape, label: str, num_tokens: int) -> Work:
    streams = _random(num_tokens, STREAMS, shape.hidden, shape=shape)
    width, num_outputs = STREAMS * shape.hidden, STREAMS * (2 + STREAMS)
    fn = torch.randn(num_outputs, width) * width**-0.5
    scale, base, sample = torch.rand(num_outputs), torch.randn(num_outputs), spread(num_tokens)

    def expected() -> tuple[Tensor, ...]:
        x = streams[sample].double()
        flat = x.flatten(1)
        mixes = flat @ fn.double().T * (flat.square().mean(1, keepdim=True) + EPS).rsqrt()
        pre, post, comb = (mixes * scale + base).split([STREAMS, STREAMS, STREAMS**2], 1)
        comb = comb.unflatten(1, (STREAMS, STREAMS)).softmax(2) + EPS
        comb = comb / (comb.sum(1, keepdim=True) + EPS)
        for _ in range(SINKHORN_ITERS - 1):
            comb = comb / (comb.sum(2, keepdim=True) + EPS)
            comb = comb / (comb.sum(1, keepdim=True) + EPS)
        collapsed = ((pre.sigmoid() + EPS).unsqueeze(2) * x).sum(1)
        return collapsed, 2 * post.sigmoid(), comb

    return Work(
        "mix_in",
        label,
        lambda: mix_in(
            streams, fn, scale, base, sinkhorn_iters=SINKHORN_ITERS, eps=EPS, norm_eps=EPS
        ),
        expected,
        tolerance=rounding(shape),
        num_bytes=num_bytes_of(streams, streams[:, 0], fn),
        flops=2 * num_tokens * width * num_outputs,
        sample=sample,
    )


def _mix_out(shape: Shape, label: str, num_tokens: int) -> Work:
    streams = _random(num_tokens, STREAMS, shape.hidden, shape=shape)
    output = _random(num_tokens, shape.hidden, shape=shape)
    post, comb = torch.rand(num_tokens, STREAMS), torch.rand(num_tokens, STREAMS, STREAMS)
    sample = spread(num_tokens)

    def expected() -> Tensor:
        mixed = torch.einsum("tjk,tjh->tkh", comb[sample].double(), streams[sample].double())
        return mixed + post[sample].double()[:, :, None] * output[sample].double()[:, None]

    return Work(
        "mix_out", label, lambda: mix_out(output, streams, post, comb), expected,
        tolerance=rounding(shape), num_bytes=2 * num_bytes_of(streams) + num_bytes_of(output),
        sample=sample,
    )  # fmt: skip


def _fp8_weight(out: int, channels: int) -> BlockScaled:
    values = torch.randn(out, channels).to(torch.float8_e4m3fn)
    blocks = (-(-out // 128), -(-channels // 128))
    return BlockScaled(values, torch.randint(118, 122, blocks).to(torch.uint8))


def _fp4_weight(num_matrices: int, out: int, channels: int) -> BlockScaled:
    values = torch.randint(0, 256, (num_matrices, out, channels // 2), dtype=torch.uint8)
    scale = torch.randint(118, 122, (num_matrices, out, channels // 32))
    return BlockScaled(values, scale.to(torch.uint8))


def _rounded(x: Tensor) -> Tensor:
    """Activations as block-scaled products see them, fp64."""
    values, scale = quantise(x)
    spread_scale = scale.double().repeat_interleave(128, 1)[:, : x.shape[1]]
    return codes.decode_e4m3(values).double() * spread_scale


def _fp8_linear(shape: Shape, label: str, num_tokens: int) -> Work:
    x = _random(num_tokens, shape.hidden, shape=shape)
    weight, sample = _fp8_weight(shape.hidden, shape.hidden), spread(num_tokens)
    return Work(
        "matmul",
        f"fp8, {label}",
        lambda: linear(x, weight),
        lambda: _rounded(x[sample]) @ weight.plain().double().T,
        tolerance=rounding(shape),
        num_bytes=num_bytes_of(weight.codes, weight.scale, x) + num_bytes_of(x),
        flops=2 * num_tokens * shape.hidden**2,
        rate="fp8",
        sample=sample,
    )


def _experts(shape: Shape, label: str, num_tokens: int, kind: str) -> Work:
    """The first product of the routed experts, gate and up."""
    out, channels = 2 * shape.expert_width, shape.hidden
    weight: Weight
    if kind == "fp4":
        weight = _fp4_weight(shape.num_experts, out, channels)
    else:
        weight = _random(shape.num_experts, out, channels, shape=shape, scale=0.02)
    x = _random(num_tokens, channels, shape=shape)
    chosen = torch.rand(num_tokens, shape.num_experts).topk(shape.experts_per_token).indices
    experts, order = chosen.flatten().sort(stable=True)
    rows = torch.div(order, shape.experts_per_token, rounding_mode="floor")
    counts = experts.bincount(minlength=shape.num_experts)
    sample = spread(len(rows), 8)

    def expected() -> Tensor:
        parts = []
        for row, expert in zip(rows[sample], experts[sample].tolist(), strict=True):
            one = weight[expert]
            plain = one.double() if isinstance(one, Tensor) else one.plain().double()
            values = x[row].double() if kind == "plain" else _rounded(x[row][None])[0]
            parts.append(plain @ values)
        return torch.stack(parts)

    each = num_bytes_of(weight[0]) if isinstance(weight, Tensor) else 0
    if isinstance(weight, BlockScaled):
        each = num_bytes_of(weight.codes[0], weight.scale[0])
    hit = int((counts > 0).sum())
    return Work(
        "matmul",
        f"{kind if kind == 'fp4' else 'bf16'} experts, {label}",
        lambda: grouped_linear(x, weight, counts, rows),
        expected,
        tolerance=rounding(shape),
        num_bytes=hit * each + num_bytes_of(x) + len(rows) * out * shape.element_bytes,
        flops=2 * len(rows) * out * channels,
        sample=sample,
    )


def _quantise(shape: Shape) -> Work:
    x, sample = _random(shape.chunk, shape.hidden, shape=shape), spread(shape.chunk)

    def expected() -> tuple[Tensor, Tensor]:
        exponent = (x[sample].double().abs() / 448).clamp(min=1e-4 / 448)
        blocks = torch.nn.functional.pad(exponent, (0, -shape.hidden % 128)).unflatten(1, (-1, 128))
        scale = torch.exp2(blocks.amax(2).log2().ceil())
        scaled = x[sample].double() / scale.repeat_interleave(128, 1)[:, : shape.hidden]
        return codes.encode_e4m3(scaled.float()), scale

    return Work(
        "quantise", "prompt", lambda: quantise(x), expected, tolerance=0,
        num_bytes=num_bytes_of(x) + x.numel() + x.numel() // 32, sample=sample,
    )  # fmt: skip


def _swiglu(shape: Shape) -> Work:
    num_rows = shape.chunk * shape.experts_per_token
    gate_up = _random(num_rows, 2 * shape.expert_width, shape=shape, scale=6)
    weights, sample = torch.rand(num_rows), spread(num_rows)

    def expected() -> Tensor:
        gate, up = gate_up[sample].double().chunk(2, dim=1)
        gate = gate.clamp(max=LIMIT)
        return gate * gate.sigmoid() * up.clamp(-LIMIT, LIMIT) * weights[sample].double()[:, None]

    return Work(
        "swiglu", "prompt", lambda: swiglu(gate_up, LIMIT, weights), expected,
        tolerance=rounding(shape), num_bytes=num_bytes_of(gate_up) * 3 // 2, sample=sample,
    )  # fmt: skip


def _draw(shape: Shape) -> Work:
    """Every request with filters of its own; the truth is the definition: sort, sum, search."""
    n, vocab = shape.batch, shape.vocab
    logits, draws = torch.randn(n, vocab) * 3, torch.rand(n, dtype=torch.float64)
    temperature = torch.rand(n, dtype=torch.float64) + 0.5
    top_k, top_p = torch.randint(1, vocab, (n,)), torch.rand(n, dtype=torch.float64)
    top_k[::2], top_p[::3] = vocab, 1.0
    min_p = torch.zeros(n, dtype=torch.float64)

    def expected() -> Tensor:
        values, ids = logits.double().sort(descending=True, stable=True)
        mass = ((values - values[:, :1]) / temperature[:, None]).exp()
        mass *= torch.arange(vocab) < top_k[:, None]
        before = mass.cumsum(1) - mass
        mass *= before < top_p[:, None] * mass.sum(1, keepdim=True)
        total = mass.cumsum(1)
        place = (total <= draws[:, None] * total[:, -1:]).sum(1, keepdim=True)
        return ids.gather(1, place)[:, 0]

    options = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    return Work(
        "draw_token", f"{n} requests", lambda: draw_tokens(logits, draws, **options), expected,
        tolerance=0, num_bytes=num_bytes_of(logits),
    )  # fmt: skip
