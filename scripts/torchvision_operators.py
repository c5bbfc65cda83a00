"""Declares operators of torchvision when it is imported, for a build whose compiled part does not load."""

import sys
from importlib.machinery import PathFinder


def _declare():
    from torch.library import Library

    library = Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _declare.library = library  # what it declares lives as long as it does


class _BeforeTorchvision:
    @staticmethod
    def find_spec(name, path=None, target=None):
        spec = PathFinder.find_spec(name, path, target) if name == "torchvision" else None
        if spec is not None:
            execute = spec.loader.exec_module

            def exec_module(module):
                _declare()
                execute(module)

            spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _BeforeTorchvision)
