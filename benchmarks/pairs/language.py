"""Programs that read or write text and speech."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from setting import compiled, device, graphed, size, use_tf32


class CausalAttention(nn.Module):
    """Attention as nanoGPT writes it where it cannot use the fused one."""

    def __init__(self, width, heads, length, fused):
        super().__init__()
        self.heads, self.fused = heads, fused
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.register_buffer("mask", torch.tril(torch.ones(length, length)).view(1, 1, length, length))

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = (one.view(batch, length, self.heads, -1).transpose(1, 2) for one in self.qkv(x).split(width, 2))
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = (q @ k.transpose(-2, -1)) * k.shape[-1] ** -0.5
            y = scores.masked_fill(self.mask[:, :, :length, :length] == 0, float("-inf")).softmax(-1) @ v
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class CharacterModel(nn.Module):
    def __init__(self, words, width, depth, heads, length, fused):
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.attention = nn.ModuleList(CausalAttention(width, heads, length, fused) for _ in range(depth))
        self.mlp = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(depth)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * depth + 1))
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, tokens, targets):
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for number, (attention, mlp) in enumerate(zip(self.attention, self.mlp, strict=True)):
            x = x + attention(self.norms[2 * number](x))
            x = x + mlp(self.norms[2 * number + 1](x))
        logits = self.head(self.norms[-1](x))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


def character_model(change):
    """A character model in the manner of nanoGPT: two passes for each update, two groups of parameters."""
    if change == "tf32":
        use_tf32()
    length = size(256, 16)
    model = CharacterModel(65, size(384, 32), size(4, 2), size(6, 2), length, fused=change == "sdpa").to(device)
    decay = [one for one in model.parameters() if one.dim() > 1]
    other = [one for one in model.parameters() if one.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": other, "weight_decay": 0.0}], lr=1e-3,
        fused=change == "fused" or None,
    )  # fmt: skip
    text = torch.randint(0, 65, (100_000,))
    chooser = torch.Generator().manual_seed(1)
    run = compiled(model) if change == "compile" else model

    passes = 1 if change == "whole_batch" else 2

    def batch():
        starts = torch.randint(len(text) - length - 1, (size(64, 4) // passes,), generator=chooser)
        x = torch.stack([text[start : start + length] for start in starts])
        y = torch.stack([text[start + 1 : start + 1 + length] for start in starts])
        return x.to(device), y.to(device)

    def step():
        total = 0.0
        for _ in range(passes):
            x, y = batch()
            with torch.autocast(device.type, torch.bfloat16, enabled=change == "bf16"):
                loss = run(x, y) / passes
            loss.backward()
            total = total + loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total

    return step


def checkpointed_llama(change):
    """A Llama of Hugging Face is trained in fp32 with gradient checkpointing, as an example for little memory does."""
    import transformers

    if change == "tf32":
        use_tf32()
    config = transformers.LlamaConfig(
        vocab_size=size(8192, 128), hidden_size=size(768, 32), intermediate_size=size(2048, 64),
        num_hidden_layers=size(4, 2), num_attention_heads=size(12, 4), num_key_value_heads=size(4, 2), use_cache=False,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).to(device)
    if change != "no_checkpointing":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    tokens = torch.randint(0, config.vocab_size, (size(4, 1), size(512, 16)), device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5, fused=change == "fused" or None)
    schedule = transformers.get_cosine_schedule_with_warmup(optimizer, 100, 10_000)

    def step():
        with torch.autocast(device.type, torch.bfloat16, enabled=change == "bf16"):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        return loss

    return step


def review_classifier(change):
    """DistilBERT is fine-tuned on short texts that are padded to 256 tokens."""
    import transformers

    if change == "tf32":
        use_tf32()
    config = transformers.DistilBertConfig(
        vocab_size=size(30522, 128), dim=size(768, 32), hidden_dim=size(3072, 64), n_layers=size(4, 2),
        n_heads=size(12, 4), num_labels=2,
    )  # fmt: skip
    model = transformers.DistilBertForSequenceClassification(config).to(device).train()
    longest, most = size(72, 12), size(256, 24)
    lengths = torch.randint(longest // 3, longest + 1, (size(16, 2),))
    width = longest if change == "shorter_padding" else most
    mask = (torch.arange(width) < lengths[:, None]).long()
    tokens = torch.randint(1, config.vocab_size, (len(lengths), most))[:, :width] * mask
    labels = torch.randint(0, 2, (len(lengths),))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5, fused=change == "fused" or None)
    run = compiled(model) if change == "compile" else model

    def step():
        batch = {"input_ids": tokens, "attention_mask": mask, "labels": labels}
        batch = {name: one.to(device) for name, one in batch.items()}
        with torch.autocast(device.type, torch.bfloat16, enabled=change == "bf16"):
            loss = run(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def sentence_embeddings(change):
    """A small MPNet embeds padded sentences: the mean of the last layer, normalized, as numpy arrays."""
    import transformers

    config = transformers.MPNetConfig(
        vocab_size=size(30527, 128), hidden_size=size(384, 32), intermediate_size=size(1536, 64),
        num_hidden_layers=size(4, 2), num_attention_heads=size(12, 4),
    )  # fmt: skip
    model = transformers.MPNetModel(config, add_pooling_layer=False).to(device).eval()
    if change == "half":
        model = model.to(torch.bfloat16)
    count = size(32, 2) * (2 if change == "batch_x2" else 1)
    lengths = torch.randint(8, size(64, 16) + 1, (count,))
    lengths[0] = size(64, 16)
    mask = (torch.arange(size(64, 16)) < lengths[:, None]).long()
    tokens = torch.randint(3, config.vocab_size, mask.shape) * mask + (1 - mask)
    run = compiled(model) if change == "compile" else model

    def embed():
        ids, filled = tokens.to(device), mask.to(device)
        states = run(input_ids=ids, attention_mask=filled).last_hidden_state.float()
        weights = filled.unsqueeze(-1).float()
        mean = (states * weights).sum(1) / weights.sum(1).clamp(min=1e-9)
        return torch.from_numpy(F.normalize(mean, dim=1).detach().cpu().numpy())

    return torch.inference_mode()(embed) if change == "inference_mode" else embed


def speech_to_text(change):
    """A Whisper-like model writes 24 tokens for a clip, greedily."""
    import transformers

    config = transformers.WhisperConfig(
        vocab_size=size(8000, 300), d_model=size(384, 32), encoder_layers=size(4, 1), decoder_layers=size(4, 1),
        encoder_attention_heads=size(6, 2), decoder_attention_heads=size(6, 2), encoder_ffn_dim=size(1536, 64),
        decoder_ffn_dim=size(1536, 64), max_source_positions=size(500, 50), pad_token_id=0, bos_token_id=1,
        eos_token_id=2, decoder_start_token_id=1, suppress_tokens=None, begin_suppress_tokens=None,
        attn_implementation="sdpa" if change == "sdpa" else "eager",
    )  # fmt: skip
    model = transformers.WhisperForConditionalGeneration(config).to(device).eval()
    dtype = torch.bfloat16 if change == "half" else torch.float32
    model = model.to(dtype)
    clips = torch.randn(
        2 if change == "clips_x2" else 1, 80, 2 * config.max_source_positions, device=device, dtype=dtype
    )
    count = size(24, 4)

    @torch.no_grad()
    def write():
        heard = model.model.encoder(clips).last_hidden_state
        token = torch.full((len(clips), 1), config.decoder_start_token_id, device=device)
        cache = transformers.EncoderDecoderCache(transformers.DynamicCache(), transformers.DynamicCache())
        written = []
        for _ in range(count):
            out = model(encoder_outputs=(heard,), decoder_input_ids=token, past_key_values=cache, use_cache=True)
            token = out.logits[:, -1:].argmax(-1)
            written.append(token)
            if change != "no_item" and (token == config.eos_token_id).all():
                break
        return torch.cat(written, 1).cpu()

    return write


def lora_fine_tuning(change):
    """Adapters of peft are trained in a Qwen2-like model in bf16, with gradient checkpointing."""
    import peft
    import transformers

    config = transformers.Qwen2Config(
        vocab_size=size(8192, 128), hidden_size=size(896, 32), intermediate_size=size(2432, 64),
        num_hidden_layers=size(4, 2), num_attention_heads=size(14, 4), num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    model = transformers.Qwen2ForCausalLM(config).to(torch.bfloat16).to(device)
    model = peft.get_peft_model(
        model,
        peft.LoraConfig(r=8, lora_alpha=16, lora_dropout=0.0, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]),
    )
    if change != "no_checkpointing":
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    model.train()
    tokens = torch.randint(0, config.vocab_size, (size(4, 1), size(512, 16)), device=device)
    labels = tokens.masked_fill(torch.arange(tokens.shape[1], device=device) < tokens.shape[1] // 4, -100)
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=2e-4, fused=change == "fused" or None)
    losses = []

    def step():
        loss = model(input_ids=tokens, attention_mask=torch.ones_like(tokens), labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach() if change == "no_item" else loss.item())
        return loss

    return step


def lstm_tagger(change):
    """A bidirectional LSTM tags packed sentences; accuracy and loss are read in each step."""
    vocabulary, tags = size(20_000, 100), 17

    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.words = nn.Embedding(vocabulary, size(128, 8), padding_idx=0)
            self.lstm = nn.LSTM(size(128, 8), size(256, 8), num_layers=2, bidirectional=True, batch_first=True)
            self.out = nn.Linear(2 * size(256, 8), tags)

        def forward(self, tokens, lengths):
            packed = nn.utils.rnn.pack_padded_sequence(
                self.words(tokens), lengths, batch_first=True, enforce_sorted=False
            )
            states, _ = nn.utils.rnn.pad_packed_sequence(
                self.lstm(packed)[0], batch_first=True, total_length=tokens.shape[1]
            )
            return self.out(states)

    model = Tagger().to(device)
    count, longest = size(32, 4) * (2 if change == "batch_x2" else 1), size(50, 8)
    lengths = torch.randint(4, longest + 1, (count,))
    tokens = torch.randint(1, vocabulary, (count, longest)) * (torch.arange(longest) < lengths[:, None])
    goal = torch.randint(0, tags, tokens.shape).masked_fill(tokens == 0, -100)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=change == "fused" or None)
    log = []

    def step():
        ids, wanted = tokens.to(device), goal.to(device)
        scores = model(ids, lengths)
        loss = F.cross_entropy(scores.view(-1, tags), wanted.view(-1), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        right = (scores.argmax(-1) == wanted).sum() / (wanted != -100).sum()
        log.append((loss.detach(), right) if change == "no_item" else (loss.item(), right.item()))
        return loss

    return step


def translator(change):
    """A GRU decoder with additive attention learns by teacher forcing, one token after another."""
    vocabulary, width, length = size(6000, 50), size(256, 16), size(16, 4)

    class Decoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.words = nn.Embedding(vocabulary, width)
            self.query, self.keys, self.energy = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, 1)
            self.cell, self.out = nn.GRUCell(2 * width, width), nn.Linear(width, vocabulary)

        def forward(self, token, state, memory):
            scores = self.energy(torch.tanh(self.query(state).unsqueeze(1) + self.keys(memory))).softmax(1)
            state = self.cell(torch.cat([self.words(token), (scores * memory).sum(1)], -1), state)
            return self.out(state), state

    words, encoder = nn.Embedding(vocabulary, width).to(device), nn.GRU(width, width, batch_first=True).to(device)
    decoder = Decoder().to(device)
    everything = [*words.parameters(), *encoder.parameters(), *decoder.parameters()]
    optimizer = torch.optim.Adam(
        everything, lr=1e-3, fused=change == "fused" or None, capturable=change == "graph" and device.type == "cuda"
    )
    source, target = torch.randint(0, vocabulary, (2, size(64, 4), length), device=device)
    run = compiled(decoder) if change == "compile" else decoder

    def update():
        memory, state = encoder(words(source))
        state, token, loss = state[0], target[:, 0], 0.0
        for place in range(1, length):
            logits, state = run(token, state, memory)
            loss = loss + F.cross_entropy(logits, target[:, place])
            token = target[:, place]
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(everything, 1.0)
        optimizer.step()
        return loss / (length - 1)

    return graphed(update) if change == "graph" else update


def routed_experts(change):
    """A transformer layer whose tokens go to two of eight experts, found by torch.where for each expert."""
    width, count = size(512, 16), size(4096, 32)

    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.router = nn.Linear(width, 8, bias=False)
            self.up = nn.Parameter(torch.randn(8, width, 2 * width) * width**-0.5)
            self.down = nn.Parameter(torch.randn(8, 2 * width, width) * width**-0.5)

        def forward(self, x):
            weights, chosen = self.router(x).softmax(-1).topk(2)
            weights = weights / weights.sum(-1, keepdim=True)
            if change == "all_experts":
                gates = torch.zeros(len(x), 8, device=x.device, dtype=weights.dtype).scatter(1, chosen, weights)
                hidden = F.silu(torch.einsum("tw,ewh->eth", x, self.up))
                return torch.einsum("eth,ehw,te->tw", hidden, self.down, gates.to(hidden.dtype))
            out = torch.zeros_like(x)
            for expert in range(8):
                rows, place = torch.where(chosen == expert)
                if rows.numel() == 0:
                    continue
                hidden = F.silu(x[rows] @ self.up[expert])
                out.index_add_(0, rows, (hidden @ self.down[expert]) * weights[rows, place, None])
            return out

    layers = nn.ModuleList(Experts() for _ in range(size(4, 1))).to(device)
    if change == "half":
        layers = layers.to(torch.bfloat16)
    if change == "tf32":
        use_tf32()
    norm = nn.LayerNorm(width).to(device)
    optimizer = torch.optim.AdamW(layers.parameters(), lr=1e-4, fused=change == "fused" or None)
    x = torch.randn(count, width, device=device)

    def step():
        h = x
        for layer in layers:
            h = h + layer(norm(h).to(layer.up.dtype))
        loss = h.float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return step


def speech_recognizer(change):
    """Wav2Vec2 of Hugging Face is fine-tuned with CTC on clips of different lengths."""
    import transformers

    if change == "tf32":
        use_tf32()
    config = transformers.Wav2Vec2Config(
        vocab_size=32, hidden_size=size(512, 32), intermediate_size=size(2048, 64), num_hidden_layers=size(4, 1),
        num_attention_heads=8, conv_dim=(size(256, 16),) * 7, mask_time_prob=0.0, layerdrop=0.0,
        num_conv_pos_embedding_groups=8, num_conv_pos_embeddings=32,
        attn_implementation="eager" if change != "sdpa" else "sdpa",
    )  # fmt: skip
    model = transformers.Wav2Vec2ForCTC(config).to(device).train()
    model.freeze_feature_encoder()
    samples = size(64_000, 8_000)
    lengths = torch.randint(samples // 2, samples, (size(8, 2),))
    clips = torch.randn(len(lengths), samples) * (torch.arange(samples) < lengths[:, None])
    mask = (torch.arange(samples) < lengths[:, None]).long()
    labels = torch.randint(1, 32, (len(lengths), size(24, 4)))
    optimizer = torch.optim.AdamW(
        [one for one in model.parameters() if one.requires_grad], lr=1e-4, fused=change == "fused" or None
    )

    def step():
        batch = {"input_values": clips.to(device), "attention_mask": mask.to(device), "labels": labels.to(device)}
        with torch.autocast(device.type, torch.bfloat16, enabled=change == "bf16"):
            loss = model(**batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return step


def disentangled_attention(change):
    """DeBERTa of Hugging Face, whose attention has many small ops, is trained in fp32."""
    import transformers

    if change == "tf32":
        use_tf32()
    config = transformers.DebertaV2Config(
        vocab_size=size(16_000, 100), hidden_size=size(384, 32), intermediate_size=size(1536, 64),
        num_hidden_layers=size(3, 1), num_attention_heads=size(6, 2), relative_attention=True, position_buckets=64,
        pos_att_type=["p2c", "c2p"], norm_rel_ebd="layer_norm", share_att_key=True,
    )  # fmt: skip
    model = transformers.DebertaV2ForSequenceClassification(config).to(device).train()
    tokens = torch.randint(1, config.vocab_size, (size(16, 2), size(128, 16)), device=device)
    mask, labels = torch.ones_like(tokens), torch.randint(0, 2, (len(tokens),), device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5, fused=change == "fused" or None)
    run = compiled(model) if change == "compile" else model

    def step():
        with torch.autocast(device.type, torch.bfloat16, enabled=change == "bf16"):
            loss = run(input_ids=tokens, attention_mask=mask, labels=labels).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


PROGRAMS = {
    character_model: {"sdpa": "fused_attention", "tf32": "tf32", "bf16": "half_precision",
                      "fused": "fused_optimizer", "compile": "fuse_pointwise", "whole_batch": "larger_batch"},
    checkpointed_llama: {"no_checkpointing": "no_recompute", "tf32": "tf32", "bf16": "half_precision",
                         "fused": "fused_optimizer"},
    review_classifier: {"shorter_padding": "trim_padding", "tf32": "tf32", "bf16": "half_precision",
                        "fused": "fused_optimizer", "compile": "fuse_pointwise"},
    sentence_embeddings: {"half": "half_precision", "inference_mode": "no_autograd", "batch_x2": ("double_batch", 2),
                          "compile": "fuse_pointwise"},
    speech_to_text: {"sdpa": "fused_attention", "half": "half_precision", "clips_x2": ("double_batch", 2),
                     "no_item": "remove_sync"},
    lora_fine_tuning: {"no_checkpointing": "no_recompute", "fused": "fused_optimizer", "no_item": "remove_sync"},
    lstm_tagger: {"no_item": "remove_sync", "fused": "fused_optimizer", "batch_x2": ("double_batch", 2)},
    translator: {"compile": "fuse_pointwise", "graph": "cuda_graph", "fused": "fused_optimizer"},
    routed_experts: {"all_experts": "larger_batch", "tf32": "tf32", "half": "half_precision",
                     "fused": "fused_optimizer"},
    speech_recognizer: {"tf32": "tf32", "bf16": "half_precision", "sdpa": "fused_attention",
                        "fused": "fused_optimizer"},
    disentangled_attention: {"tf32": "tf32", "bf16": "half_precision", "fused": "fused_optimizer",
                             "compile": "fuse_pointwise"},
}  # fmt: skip
