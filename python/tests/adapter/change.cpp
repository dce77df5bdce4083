// change.cpp: the function of libtorch_cuda.so that the adapter looks up.
#include "check.h"

void torch::cuda::CUDAPluggableAllocator::changeCurrentAllocator(const std::shared_ptr<cca::CUDAAllocator>& allocator) {
  cca::allocator.store(allocator.get());
  current = allocator;
}
