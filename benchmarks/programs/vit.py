"""A ViT-S/16 in fp32 that classifies images, eight at a time."""

import torch
import torch.nn as nn
import torch.nn.functional as F

WIDTH, HEADS, LAYERS, BATCH = 384, 6, 12, 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.project = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        batch, length, _ = x.shape
        qkv = self.qkv(self.norm_1(x)).reshape(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*qkv)
        x = x + self.project(attended.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class ViT(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 16, 16)
        self.token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.positions = nn.Parameter(torch.zeros(1, 197, WIDTH))
        self.blocks = nn.Sequential(*[Block() for _ in range(LAYERS)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 1000)

    def forward(self, images):
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat((self.token.expand(len(x), -1, -1), x), dim=1) + self.positions
        return self.head(self.norm(self.blocks(x))[:, 0])


def main():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = ViT().to(device).eval()
    images = torch.randn(64, 3, 224, 224)
    found = []
    with torch.no_grad():
        for number in range(100_000):
            start = BATCH * number % 64
            batch = images[start : start + BATCH].to(device)
            found.append(model(batch).argmax(-1))
    print(torch.cat(found).bincount().argmax().item())


if __name__ == "__main__":
    main()
