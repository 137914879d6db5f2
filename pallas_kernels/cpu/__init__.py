"""What the CPU kernels share: the call frame, helper threads, LLVM code over vectors."""
