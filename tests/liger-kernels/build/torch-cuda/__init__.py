"""The PyPI package liger-kernel in the shape of the Hub's kernel package, for machines without a Hub."""

from types import SimpleNamespace

from liger_kernel.transformers.geglu import LigerGEGLUMLP

layers = SimpleNamespace(LigerGEGLUMLP=LigerGEGLUMLP)
