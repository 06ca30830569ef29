"""A ResNet-50 of torchvision in fp32, trained on photos that PIL augments in the training process."""

import numpy as np
import torch
import torchvision
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms


class Photos(Dataset):
    def __init__(self, transform):
        small = np.random.default_rng(0).integers(0, 256, (32, 24, 32, 3), dtype=np.uint8)
        self.photos = [Image.fromarray(one).resize((500, 375)) for one in small]
        self.transform = transform

    def __len__(self):
        return 50_000

    def __getitem__(self, index):
        return self.transform(self.photos[index % len(self.photos)]), index % 1000


def main():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    transform = transforms.Compose(
        [
            transforms.RandomResizedCrop(224),
            transforms.RandomHorizontalFlip(),
            transforms.ColorJitter(0.4, 0.4, 0.4),
            transforms.ToTensor(),
            transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
        ]
    )
    model = torchvision.models.resnet50().to(device).train()
    loss_of = torch.nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    loader = DataLoader(Photos(transform), batch_size=64, shuffle=True)
    for epoch in range(3):
        for images, labels in loader:
            images, labels = images.to(device), labels.to(device)
            loss = loss_of(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
