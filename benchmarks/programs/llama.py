"""A small Llama of transformers in fp32 with activation checkpointing, trained with AdamW."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def main():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = LlamaConfig(
        vocab_size=16384,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=8,
        num_attention_heads=16,
        num_key_value_heads=16,
        max_position_embeddings=1024,
        use_cache=False,
    )
    model = LlamaForCausalLM(config).to(device)
    model.gradient_checkpointing_enable()
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    data = torch.randint(0, config.vocab_size, (512, 512))
    for epoch in range(100):
        for batch in data.split(4):
            ids = batch.to(device)
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        print(f"epoch {epoch}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
