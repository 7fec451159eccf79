from fastrl.ops.value_loss.api import ValueLoss, value_loss
from fastrl.ops.value_loss.op import VALUE_METRICS

__all__ = ["VALUE_METRICS", "ValueLoss", "value_loss"]
