"""A large MLP in bf16, compiled, with a fused optimizer and its data on the GPU: little is left to change."""

import torch
import torch.nn as nn

WIDTH, LAYERS, BATCH = 8192, 6, 16_384


def main():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS)])
    model = model.to(device, torch.bfloat16)
    compiled = torch.compile(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, fused=True)
    x = torch.randn(BATCH, WIDTH, device=device, dtype=torch.bfloat16)
    for step in range(20_000):
        loss = compiled(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 200 == 0:
            print(f"step {step}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
