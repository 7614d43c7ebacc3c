"""Lets PyPI's torchvision import beside a CPU-only torch: declares the one operator it registers
unconditionally."""

import sys


class _BeforeTorchvision:
    library = None

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name == "torchvision._meta_registrations" and cls.library is None:
            import torch

            cls.library = torch.library.Library("torchvision", "DEF")
            for operator in ("nms", "qnms"):
                cls.library.define(operator + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return None


sys.meta_path.insert(0, _BeforeTorchvision)
