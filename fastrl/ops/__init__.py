"""One folder per operation: ``api`` (public function), ``op`` (torch.library and autograd), ``reference`` (definition)."""
