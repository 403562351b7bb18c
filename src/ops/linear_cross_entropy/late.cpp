// What: gradients that waited for a factor: checked, multiplied, rounded once.
// Why: forward forms them before anybody knows what backward will bring.
// Never: multiplies twice: that is for the caller to see to.
#include "ops/linear_cross_entropy/late.hpp"

#include <cmath>

#include "core/fail.hpp"
#include "core/half.hpp"

namespace talea {
namespace lce {
namespace {

void check(const LinearCrossEntropyLate& l) {
  const auto data = ErrorKind::invalid_data;
  require(l.factor && l.factor.rank <= 1, data, "factor: needed, a scalar or one a token");
  require(!l.expected || (l.expected.rank == 0 && l.factor.rank == 0), data,
          "expected: a scalar beside a scalar factor is needed");
  require(l.dx || l.dw, ErrorKind::usage, "dx, dw: neither is given");
  for (const Tensor* t : {&l.dx, &l.dw, &l.dx_sum, &l.dw_sum})
    require(!*t || t->rank == 2, data, "dx, dw and their sums: matrices are needed");
  for (const Tensor* t : {&l.dx_sum, &l.dw_sum})
    require(!*t || t->dtype == DType::f32, data, "dx_sum, dw_sum: fp32 is needed");
  require(l.factor.rank == 0 || (!l.dw && l.dx && l.dx.shape[0] == l.factor.shape[0]), data,
          "factor: one a token scales the rows of dx alone");
  require(!l.dx_sum || (l.dx && l.dx.shape == l.dx_sum.shape), data, "dx_sum: not as large as dx");
  require(!l.dw_sum || (l.dw && l.dw.shape == l.dw_sum.shape), data, "dw_sum: not as large as dw");
  require(!l.dw_rest || (l.dw && l.dw.dtype == DType::bf16 && l.dw_rest.dtype == DType::i32), data,
          "dw_rest: i32 beside a bf16 dw is needed");
  require(!l.dx_rest || (l.dx && l.dx.dtype == DType::bf16 && l.dx_rest.dtype == DType::u8 &&
                         l.dx.stride[1] == 1 && l.dx_rest.stride[1] == 1),
          data, "dx_rest: u8 beside a bf16 dx is needed, both with column stride 1");
  require(!l.dx_rest || (l.dx_rest.shape[0] == l.dx.shape[0] &&
                         l.dx_rest.shape[1] == lce::dx_rest_columns(l.dx.shape[1])),
          data, "dx_rest: not of a call with this dx");
  for (const Tensor* t : {&l.expected, &l.dx, &l.dw, &l.dx_sum, &l.dw_sum, &l.dw_rest, &l.dx_rest})
    require(!*t || (t->device == l.factor.device && t->device_index == l.factor.device_index), data,
            "factor: lies on another device than the gradients");
}

// 0 stays 0 whatever the factor: an ignored row has no gradient.
void scale(const Tensor& to, const Tensor& from, const Tensor& factor) {
  for (int64_t i = 0; i < to.shape[0]; ++i) {
    const double f = at(factor, factor.rank ? i : 0);
    for (int64_t j = 0; j < to.shape[1]; ++j) {
      const double x = at(from, i, j);
      put(to, i, j, x == 0 ? 0 : x * f);
    }
  }
}

Fault host_fault;

void on_host(const LinearCrossEntropyLate& l) {
  if (l.expected) {
    const double got = at(l.factor, 0), expected = at(l.expected, 0);
    if (got == expected) return;
    host_fault.expected = static_cast<float>(expected), host_fault.got = static_cast<float>(got);
    host_fault.raised = 1;
    for (int64_t i = 0; l.dx && i < l.dx.shape[0]; ++i)
      for (int64_t j = 0; j < l.dx.shape[1]; ++j) put(l.dx, i, j, NAN);
    return;
  }
  require(!l.dw_rest && !l.dx_rest, ErrorKind::usage,
          "dx_rest, dw_rest: no lane of the host keeps one");
  if (l.dx) scale(l.dx, l.dx_sum ? l.dx_sum : l.dx, l.factor);
  if (l.dw) scale(l.dw, l.dw_sum ? l.dw_sum : l.dw, l.factor);
}

void report(Fault* fault) {
  if (!fault || !fault->raised) return;
  fault->raised = 0;
  fail(ErrorKind::invalid_data,
       "grad_scale = {}: an earlier backward brought {}; its gradients of the weight were formed "
       "with the former, its dx is NaN",
       fault->expected, fault->got);
}

}  // namespace

}  // namespace lce

void linear_cross_entropy_late(const LinearCrossEntropyLate& late, Stream stream) {
  lce::check(late);
  if (late.factor.device == DeviceKind::cuda)
    lce::late_on_device(late, stream);
  else
    lce::on_host(late);
}

void require_clean() {
  lce::report(lce::known_fault());
  lce::report(&lce::host_fault);
}

const volatile int32_t* fault_flag() {
  const lce::Fault* known = lce::known_fault();
  return known ? &known->raised : &lce::host_fault.raised;
}

}  // namespace talea
