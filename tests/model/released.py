"""Small checkpoints in the form of the release: its names, config and quantised weights."""

import dataclasses
import json
import re

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from sluice.kernels import codes
from sluice.model.make_checkpoint import TINY, make_checkpoint, random_tensors, transformers_config
from sluice.model.v4.config import LayerType, MlpType

# Blocks that are not full, and several of them; 128 is what FP8 experts need to stay as stored.
RELEASED = dataclasses.replace(TINY, hidden_size=160, q_lora_rank=48, expert_width=128)
FP8_NAMES = re.compile(
    r".*\.(attn\.(wq_a|wq_b|wkv|wo_a|wo_b)|indexer\.wq_b|shared_experts\.w\d)\.weight"
)
EXPERT_NAMES = re.compile(r".*\.experts\.\d+\.w\d\.weight")
PARTS = 3  # files


def released_tensors(config, *, seed=0, experts="fp4"):
    """Tensors of the release's names and dtypes."""
    tensors = {}
    for name, tensor in random_tensors(config, seed=seed).items():
        form = form_of(name, experts)
        if form in QUANTISE:
            tensors[name], tensors[name.removesuffix("weight") + "scale"] = QUANTISE[form](tensor)
        else:
            tensors[name] = tensor.bfloat16() if form == "bf16" else tensor
    return tensors


def form_of(name, experts="fp4"):
    """How the release stores a tensor; a base model's experts are FP8."""
    if EXPERT_NAMES.fullmatch(name):
        return experts
    if FP8_NAMES.fullmatch(name):
        return "fp8"
    return "bf16" if name.endswith(".weight") else "i64" if name.endswith("tid2eid") else "fp32"


def write_released(folder, tensors, config=RELEASED):
    """The folder of a release, its weights in several files; config.json in its dialect."""
    make_checkpoint(folder, config=config)  # for its tokenizer
    (folder / "model.safetensors").unlink()
    (folder / "config.json").write_text(json.dumps(official_config(config)), encoding="utf-8")
    weight_map = {name: f"part-{i % PARTS}.safetensors" for i, name in enumerate(sorted(tensors))}
    for part in set(weight_map.values()):
        chosen = {n: tensors[n].contiguous() for n in tensors if weight_map[n] == part}
        save_file(chosen, folder / part)
    index = folder / "model.safetensors.index.json"
    content = {"metadata": {}, "weight_map": weight_map}
    index.write_text(json.dumps(content), encoding="utf-8")


def official_config(config):
    data = transformers_config(config)
    for name in ("layer_types", "mlp_layer_types", "compress_rates", "rope_parameters"):
        del data[name]
    ratios = {LayerType.SLIDING: 0, LayerType.CSA: 4, LayerType.HCA: config.hca_ratio}
    return data | {
        "compress_ratios": [ratios[kind] for kind in config.layer_types] + [0],
        "num_hash_layers": config.mlp_types.count(MlpType.HASH),
        "rope_scaling": {
            "type": "yarn",
            "factor": config.compress_yarn.factor,
            "original_max_position_embeddings": config.compress_yarn.original_max_tokens,
        },
        "quantization_config": {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "scale_fmt": "ue8m0",
            "weight_block_size": [128, 128],
        },
        "expert_dtype": "fp4",
    }


def fp8(weight):
    """Codes [out, in] and their scale for each 128 x 128."""
    rows, columns = weight.shape
    padded = F.pad(weight, (0, -columns % 128, 0, -rows % 128))
    blocks = padded.unflatten(0, (-1, 128)).unflatten(2, (-1, 128))
    exponent = codes.scale_exponent(blocks.abs().amax((1, 3)), "e4m3")
    scaled = blocks * codes.power_of_two(-exponent)[:, None, :, None]
    code = codes.encode_e4m3(scaled).flatten(2).flatten(0, 1)[:rows, :columns]
    return code.contiguous().view(torch.float8_e4m3fn), as_ue8m0(exponent)


def fp4(weight):
    """Codes [out, in / 2], two in a byte, and their scale for each 32 channels."""
    runs = weight.unflatten(1, (-1, 32))
    exponent = codes.scale_exponent(runs.abs().amax(2), "e2m1")
    scaled = runs * codes.power_of_two(-exponent)[:, :, None]
    return codes.encode_e2m1(scaled.flatten(1)).view(torch.int8), as_ue8m0(exponent)


QUANTISE = {"fp8": fp8, "fp4": fp4}


def as_ue8m0(exponent):
    return (exponent + 127).to(torch.uint8).view(torch.float8_e8m0fnu)


FP4_VALUES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)


def dequantised(tensors):
    """What the codes stand for by the release's definition, in fp32; the others as they are."""
    plain = {}
    for name, tensor in tensors.items():
        scale = tensors.get(name.removesuffix("weight") + "scale")
        if not name.endswith(".scale"):
            plain[name] = tensor if scale is None else definition(tensor, scale).float()
    return plain


def definition(code, scale):
    """Value by value: the codes' numbers times 2 ** (scale byte - 127), found by index."""
    factor = 2.0 ** (scale.view(torch.uint8).double() - 127)
    if code.dtype == torch.float8_e4m3fn:
        row, column = (torch.arange(size) // 128 for size in code.shape)
        return code.double() * factor[row][:, column]
    byte = code.view(torch.uint8).long()
    nibbles = torch.stack([byte & 15, byte >> 4], dim=2).flatten(1)  # the even channel's is low
    signed = torch.where(nibbles < 8, 1.0, -1.0) * FP4_VALUES[nibbles % 8]
    return signed * factor[:, torch.arange(nibbles.shape[1]) // 32]
