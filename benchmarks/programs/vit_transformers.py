"""A ViT-S/16 of transformers in fp32 that classifies eight images at a time, and reads each answer."""

import torch
from transformers import ViTConfig, ViTForImageClassification


def main():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = ViTConfig(hidden_size=384, num_attention_heads=6, intermediate_size=1536)
    model = ViTForImageClassification(config).to(device).eval()
    images, seen = torch.randn(8, 3, 224, 224, device=device), 0
    for _ in range(20_000):
        with torch.no_grad():
            logits = model(pixel_values=images).logits
        seen += logits.argmax(-1).cpu().unique().numel()
    print(seen)


if __name__ == "__main__":
    main()
