"""A model of sums: its next token depends on every row that its pools should hold, and is exact."""

import torch

from sluice.cache.spec import Full, PoolSpec, Window

VOCAB, WINDOW = 61, 6
ALL = PoolSpec("all", (0, 1), (2,), "float32", 1, 8, Full())
LAST = PoolSpec("last", (0,), (3,), "float32", 1, 4, Window(WINDOW))


class SumsModel:
    specs = (ALL, LAST)
    vocab_size = VOCAB
    max_model_len = 256
    fingerprint = "sums"
    replay_tokens = WINDOW - 1
    repeats = False

    def forward(self, inputs, pools, *, all_logits=False):
        for spec in self.specs:
            slots = inputs.slots(spec, inputs.request_index, inputs.positions)
            written = inputs.positions >= inputs.num_history[inputs.request_index]
            keep = written if spec is ALL else torch.ones_like(written)
            page, row = slots[keep] // spec.rows_per_page, slots[keep] % spec.rows_per_page
            for layer in spec.layers:
                values = row_values(spec, layer, inputs.token_ids, inputs.positions)[keep]
                pools[spec.name].layer(layer)[page, row] = values
        last = inputs.query_start[1:] - 1
        sums = sum(
            _summed(inputs, pools[spec.name], layer, last)
            for spec in self.specs
            for layer in spec.layers
        )
        logits = torch.zeros(len(last), VOCAB)
        logits[torch.arange(len(last)), sums.long() % VOCAB] = 1.0
        return logits


def row_values(spec, layer, token_ids, positions):
    """Small whole numbers, [n, *row_shape], so that their sums are exact in fp32."""
    base = (token_ids * (3 + layer) + positions * 5) % 47
    channels = torch.arange(spec.row_shape[0])
    return ((base[:, None] + channels) % 47).float()


def _summed(inputs, pool, layer, last):
    """The weighted sum of a layer's live rows of every request, [R]."""
    end = inputs.positions[last]
    tokens = torch.arange(int(end.max()) + 1).expand(len(last), -1)
    valid = tokens <= end[:, None]
    if pool.spec is LAST or pool.spec.name == LAST.name:
        valid = valid & (tokens > end[:, None] - WINDOW)
    requests = inputs.request_index[last][:, None].expand_as(tokens)
    slots = inputs.slots(pool.spec, requests, tokens.clamp(min=0), valid).clamp(min=0)
    rows = pool.layer(layer)[slots // pool.spec.rows_per_page, slots % pool.spec.rows_per_page]
    weights = (tokens % 7 + 1) * valid
    return (rows.sum(dim=-1) * weights).sum(dim=-1)


def expected_tokens(prompt, max_tokens):
    """What the model answers, computed without pools."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_tokens:
        ids, positions = torch.tensor(tokens), torch.arange(len(tokens))
        total = 0
        for spec in SumsModel.specs:
            live = slice(max(0, len(tokens) - WINDOW), None) if spec is LAST else slice(None)
            for layer in spec.layers:
                rows = row_values(spec, layer, ids, positions).sum(dim=-1)
                total += int((rows * (positions % 7 + 1))[live].sum())
        tokens.append(total % VOCAB)
    return tuple(tokens[len(prompt) :])
