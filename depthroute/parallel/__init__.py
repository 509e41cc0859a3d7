"""One model on many processes, applied from outside: data parallel, sharded, in pipeline stages, by tensors and sequences."""
