"""A DeepSeek-V4 model with an eighth pool, added from outside without touching anything else."""

from sluice.cache.spec import PoolSpec, Window

TOY = PoolSpec(
    name="toy",
    layers=(1, 3, 4),
    row_shape=(2, 5),
    dtype="float32",
    tokens_per_row=1,
    tokens_per_page=6,
    retention=Window(7),
)


class ModelWithToyPool:
    """Writes a row for every token and lets the oldest live row shift the logits."""

    def __init__(self, model):
        self._model = model
        self.specs = (model.specs[0], TOY, *model.specs[1:])
        self.fingerprint = model.fingerprint + "+toy"
        self.vocab_size = model.vocab_size
        self.max_model_len = model.max_model_len
        self.replay_tokens = model.replay_tokens  # the toy's window is no longer than the model's
        self.repeats = model.repeats

    def forward(self, inputs, pools, *, all_logits=False):
        pool = pools[TOY.name]
        slots = inputs.slots(pool.spec, inputs.request_index, inputs.positions)
        page, row = slots // pool.spec.rows_per_page, slots % pool.spec.rows_per_page
        for layer in TOY.layers:
            value = (inputs.token_ids * layer + inputs.positions).float()
            pool.layer(layer)[page, row] = value[:, None, None].expand(-1, *TOY.row_shape)
        logits = self._model.forward(inputs, pools, all_logits=all_logits)

        last = inputs.query_start[1:] - 1
        positions, requests = inputs.positions[last], inputs.request_index[last]
        oldest = (positions - 6).clamp(min=0)
        slots = inputs.slots(pool.spec, requests, oldest)
        rows = pool.layer(3)[slots // pool.spec.rows_per_page, slots % pool.spec.rows_per_page]
        boosted = rows[:, 1, 4].long() % logits.shape[-1]
        logits[range(len(boosted)), boosted] += 20.0
        return logits
