// Every kernel in one translation unit.
#include "compact.cu"
#include "gate_estimate.cu"
#include "quantize.cu"
#include "sparse_axpy.cu"
#include "sparse_matvec.cu"
