// Every kernel in one translation unit.
#include "attention.cu"
#include "compact.cu"
#include "gate_estimate.cu"
#include "norm.cu"
#include "quantize.cu"
#include "rotary.cu"
#include "sparse_axpy.cu"
#include "sparse_matvec.cu"
