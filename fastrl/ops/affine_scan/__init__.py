from fastrl.ops.affine_scan.api import affine_scan

__all__ = ["affine_scan"]
