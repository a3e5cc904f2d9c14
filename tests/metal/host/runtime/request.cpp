// Reads what is to be run.
//
// The request, on standard input, little-endian int64 unless noted:
//   grid x y z, threadgroup x y z, number of seeds, seeds
//   number of threadgroups to run and the position of each; 0 for all
//   number of inputs; for each: element bytes, alignment of element 0 (modulo 16), number of
//     dimensions, shape, strides (in elements), then its elements in order (an axis of stride 0
//     counts once)
//   number of outputs; for each: element bytes, number of bytes, the first byte that must be
//     written and how many, whether it begins with a value, and that element
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "request.h"

namespace host {

Request request;

static void read_exactly(void* to, size_t size) {
  if (size > 0 && std::fread(to, 1, size, stdin) != size) {
    std::fprintf(stderr, "the request is cut short\n");
    std::exit(3);
  }
}

static int64_t read_number() {
  int64_t value = 0;
  read_exactly(&value, sizeof value);
  return value;
}

static metal::uint3 read_size() {
  const uint32_t x = static_cast<uint32_t>(read_number());
  const uint32_t y = static_cast<uint32_t>(read_number());
  const uint32_t z = static_cast<uint32_t>(read_number());
  return {x, y, z};
}

template <typename T>
static std::unique_ptr<Buffer> constant_buffer(const std::string& name, const std::vector<T>& values) {
  auto buffer = std::make_unique<Buffer>();
  buffer->name = name;
  buffer->element_bytes = sizeof(T);
  buffer->bytes.reset(values.size() * sizeof(T));
  if (!values.empty()) {
    std::memcpy(buffer->bytes.data(), values.data(), buffer->bytes.size());
  }
  return buffer;
}

// The axes along which elements lie apart, in bytes.
struct Axis {
  int64_t count, step;
};

static std::vector<Axis> axes_of(const Array& array) {
  std::vector<Axis> axes;
  for (int i = 0; i < array.ndim; ++i) {
    const int64_t step = array.strides_values[i] * array.buffer->element_bytes;
    if (array.shape_values[i] != 1 && step != 0) {
      axes.push_back({array.shape_values[i], step});
    }
  }
  return axes;
}

// Puts the elements where the strides say, in memory that spans no more than all of them.
static void place_elements(Buffer& buffer, const std::vector<Axis>& axes, int64_t alignment) {
  int64_t count = 1, after = 0;
  for (const Axis& axis : axes) {
    count *= axis.count;
    const int64_t reach = (axis.count - 1) * axis.step;
    (axis.step < 0 ? buffer.origin : after) += std::abs(reach);
  }
  const int64_t item = buffer.element_bytes;
  buffer.bytes.reset(buffer.origin + after + item);
  buffer.present.reset(buffer.origin + after + item);
  buffer.misalignment = ((alignment - buffer.origin) % 16 + 16) % 16;
  std::vector<int64_t> index(axes.size(), 0);
  for (int64_t left = count; left > 0; --left) {
    int64_t at = buffer.origin;
    for (size_t i = 0; i < axes.size(); ++i) at += index[i] * axes[i].step;
    read_exactly(buffer.bytes.data() + at, item);
    std::memset(buffer.present.data() + at, 1, item);
    for (size_t i = axes.size(); i-- > 0 && ++index[i] == axes[i].count;) index[i] = 0;
  }
}

static Array read_input(const char* name) {
  Array array;
  array.buffer = std::make_unique<Buffer>();
  Buffer& buffer = *array.buffer;
  buffer.name = name;
  buffer.element_bytes = read_number();
  const int64_t alignment = read_number();
  array.ndim = static_cast<int32_t>(read_number());
  for (int i = 0; i < array.ndim; ++i) array.shape_values.push_back(static_cast<int32_t>(read_number()));
  for (int i = 0; i < array.ndim; ++i) array.strides_values.push_back(read_number());
  place_elements(buffer, axes_of(array), alignment);
  array.shape = constant_buffer(std::string(name) + "_shape", array.shape_values);
  array.strides = constant_buffer(std::string(name) + "_strides", array.strides_values);
  return array;
}

static std::unique_ptr<Buffer> read_output(const char* name) {
  auto buffer = std::make_unique<Buffer>();
  buffer->name = name;
  buffer->kind = Kind::output;
  buffer->element_bytes = read_number();
  buffer->bytes.reset(read_number());
  buffer->first_needed = read_number();
  buffer->needed = read_number();
  buffer->initialized = read_number() != 0;
  buffer->initial.resize(buffer->element_bytes);
  read_exactly(buffer->initial.data(), buffer->initial.size());
  return buffer;
}

void read_request(const Program& program) {
  request.kernel = program.kernel;
  request.grid = read_size();
  const metal::uint3 asked = read_size();
  request.threads_asked = uint64_t(asked.x) * asked.y * asked.z;
  request.group = {std::min(asked.x, request.grid.x), std::min(asked.y, request.grid.y),
                   std::min(asked.z, request.grid.z)};
  for (int64_t left = read_number(); left > 0; --left) request.seeds.push_back(read_number());
  for (int64_t left = read_number(); left > 0; --left) request.groups.push_back(read_size());
  read_number();
  for (int i = 0; i < program.input_count; ++i) request.inputs.push_back(read_input(program.inputs[i]));
  read_number();
  for (int i = 0; i < program.output_count; ++i) {
    request.outputs.push_back(read_output(program.outputs[i]));
  }
}

} // namespace host
