// What the generated unit passes to the kernel, and how it hands the kernel to the runtime.
#pragma once

#include "atomics.h"

namespace host {

Buffer* input_buffer(int number);
Buffer* output_buffer(int number);
Buffer* shape_buffer(int number);
Buffer* strides_buffer(int number);
const void* scalar_bytes(int number);
const int& ndim(int number);

template <typename S, typename T>
inline pointer<S, const T> input(int number) {
  return pointer<S, const T>(input_buffer(number), 0);
}
template <typename T>
inline const T& scalar(int number) {
  return *static_cast<const T*>(scalar_bytes(number));
}
inline pointer<constant_space, const int> shape(int number) {
  return pointer<constant_space, const int>(shape_buffer(number), 0);
}
inline pointer<constant_space, const int64_t> strides(int number) {
  return pointer<constant_space, const int64_t>(strides_buffer(number), 0);
}
template <typename T>
inline pointer<device_space, T> output(int number) {
  return pointer<device_space, T>(output_buffer(number), 0);
}

// The thread attributes, by the names that a kernel's text mentions.
namespace attribute {
metal::uint3 thread_position_in_grid();
metal::uint3 thread_position_in_threadgroup();
metal::uint3 threadgroup_position_in_grid();
metal::uint3 threads_per_threadgroup();
metal::uint3 dispatch_threads_per_threadgroup();
metal::uint3 threads_per_grid();
metal::uint3 grid_size();
metal::uint3 grid_origin();
metal::uint3 threadgroups_per_grid();
uint32_t thread_index_in_threadgroup();
uint32_t thread_index_in_simdgroup();
uint32_t simdgroup_index_in_threadgroup();
uint32_t thread_index_in_quadgroup();
uint32_t quadgroup_index_in_threadgroup();
uint32_t simdgroups_per_threadgroup();
uint32_t dispatch_simdgroups_per_threadgroup();
uint32_t quadgroups_per_threadgroup();
uint32_t dispatch_quadgroups_per_threadgroup();
uint32_t thread_execution_width();
uint32_t threads_per_simdgroup();
} // namespace attribute

using Body = void (*)();

// What the unit knows about its kernel; `fibers` where threads meet.
struct Program {
  const char* const* inputs;
  int input_count;
  const char* const* outputs;
  int output_count;
  bool fibers;
  Site kernel;
  Body body;
};

int run(const char* outputs_path, const Program& program);

} // namespace host
