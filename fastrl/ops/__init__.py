"""One folder per operation: ``api`` (public function), ``op`` (operator and autograd), ``reference`` (definition)."""
