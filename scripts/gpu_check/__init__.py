"""One check for a machine with a GPU: are the kernels right, and how fast is everything against what the GPU can do."""
