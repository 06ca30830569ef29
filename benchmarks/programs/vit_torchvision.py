"""A ViT-B/16 of torchvision in fp32 that embeds a stream of single images, which are on the GPU."""

import torch
from torchvision.models import vit_b_16


def main():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = vit_b_16().to(device).eval()
    images, total = torch.randn(64, 3, 224, 224, device=device), 0.0
    for number in range(20_000):
        with torch.no_grad():
            scores = model(images[number % 64 : number % 64 + 1])
        total += scores.max().item()
    print(total)


if __name__ == "__main__":
    main()
