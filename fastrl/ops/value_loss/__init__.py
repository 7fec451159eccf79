from fastrl.ops.value_loss.api import VALUE_METRICS, ValueLoss, value_loss

__all__ = ["VALUE_METRICS", "ValueLoss", "value_loss"]
