"""A ResNet-50 in fp32, trained on images that are augmented by the loading process."""

import random

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset


class Photos(Dataset):
    def __init__(self, size=256, count=64):
        generator = torch.Generator().manual_seed(1)
        self.images = torch.randint(0, 256, (count, 3, size, size), dtype=torch.uint8, generator=generator)

    def __len__(self):
        return 20_000

    def __getitem__(self, index):
        image = self.images[index % len(self.images)].float() / 255
        side = random.randint(160, 256)
        top, left = random.randint(0, 256 - side), random.randint(0, 256 - side)
        image = image[:, top : top + side, left : left + side]
        image = F.interpolate(image[None], size=(224, 224), mode="bilinear", antialias=True)[0]
        if random.random() < 0.5:
            image = image.flip(-1)
        image = (image * random.uniform(0.8, 1.2) + random.uniform(-0.1, 0.1)).clamp(0, 1)
        mean, deviation = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
        return (image - mean[:, None, None]) / deviation[:, None, None], index % 1000


class Bottleneck(nn.Module):
    def __init__(self, before, width, stride):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(before, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width),
        )  # fmt: skip
        self.shortcut = nn.Identity()
        if stride > 1 or before != 4 * width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(before, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width)
            )

    def forward(self, x):
        return F.relu(self.layers(x) + self.shortcut(x))


def resnet_50():
    layers = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    before = 64
    for number, (width, count) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3))):
        for block in range(count):
            layers.append(Bottleneck(before, width, 2 if number and not block else 1))
            before = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 1000))


def main():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = resnet_50().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    loss_of = nn.CrossEntropyLoss()
    for epoch in range(10):
        for images, labels in DataLoader(Photos(), batch_size=64, shuffle=True):
            images, labels = images.to(device), labels.to(device)
            loss = loss_of(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
