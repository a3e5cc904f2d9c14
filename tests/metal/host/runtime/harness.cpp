// Runs one kernel over its grid and reports. The generated unit supplies the program.
//
// Request, on standard input, little-endian int64 unless noted:
//   grid x y z, threadgroup x y z, number of seeds, seeds
//   number of inputs; for each: element bytes, origin, misalignment, number of dimensions, shape,
//     strides (in elements), number of bytes, the bytes (uint8), which of them exist (uint8)
//   number of outputs; for each: element bytes, number of bytes
// A seed of 0 runs in order, 1 in reverse, any other one in a shuffled order.
// The outputs of the first seed go to the file named by the first argument, one after another;
// findings, and a last line "done", go to standard output.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "state.h"

namespace host {

Request request;

static int64_t read_number() {
  int64_t value = 0;
  if (std::fread(&value, sizeof value, 1, stdin) != 1) {
    std::fprintf(stderr, "the request is cut short\n");
    std::exit(3);
  }
  return value;
}

static void read_bytes(std::vector<uint8_t>& bytes, int64_t count) {
  bytes.resize(count);
  if (count > 0 && std::fread(bytes.data(), 1, count, stdin) != size_t(count)) {
    std::fprintf(stderr, "the request is cut short\n");
    std::exit(3);
  }
}

template <typename T>
static std::unique_ptr<Buffer> constant_buffer(const std::string& name, const std::vector<T>& values) {
  auto buffer = std::make_unique<Buffer>();
  buffer->name = name;
  buffer->element_bytes = sizeof(T);
  buffer->bytes.resize(values.size() * sizeof(T));
  if (!values.empty()) {
    std::memcpy(buffer->bytes.data(), values.data(), buffer->bytes.size());
  }
  return buffer;
}

static Array read_input(const char* name) {
  Array array;
  array.buffer = std::make_unique<Buffer>();
  Buffer& buffer = *array.buffer;
  buffer.name = name;
  buffer.element_bytes = read_number();
  buffer.origin = read_number();
  buffer.misalignment = read_number();
  array.ndim = static_cast<int32_t>(read_number());
  for (int i = 0; i < array.ndim; ++i) array.shape_values.push_back(static_cast<int32_t>(read_number()));
  for (int i = 0; i < array.ndim; ++i) array.strides_values.push_back(read_number());
  const int64_t bytes = read_number();
  read_bytes(buffer.bytes, bytes);
  read_bytes(buffer.present, bytes);
  array.shape = constant_buffer(std::string(name) + "_shape", array.shape_values);
  array.strides = constant_buffer(std::string(name) + "_strides", array.strides_values);
  return array;
}

static metal::uint3 read_size() {
  const uint32_t x = static_cast<uint32_t>(read_number());
  const uint32_t y = static_cast<uint32_t>(read_number());
  const uint32_t z = static_cast<uint32_t>(read_number());
  return {x, y, z};
}

static void read_request(const Program& program) {
  request.grid = read_size();
  request.group = read_size();
  request.group = {std::min(request.group.x, request.grid.x), std::min(request.group.y, request.grid.y),
                   std::min(request.group.z, request.grid.z)};
  for (int64_t left = read_number(); left > 0; --left) request.seeds.push_back(read_number());
  read_number();
  for (int i = 0; i < program.input_count; ++i) request.inputs.push_back(read_input(program.inputs[i]));
  read_number();
  for (int i = 0; i < program.output_count; ++i) {
    auto buffer = std::make_unique<Buffer>();
    buffer->name = program.outputs[i];
    buffer->kind = Kind::output;
    buffer->element_bytes = read_number();
    buffer->bytes.resize(read_number());
    request.outputs.push_back(std::move(buffer));
  }
}

// The threads of one threadgroup; those at the end of the grid may be smaller.
static void place_threads(Group& made, metal::uint3 at) {
  const metal::uint3 grid = request.grid, full = request.group;
  const metal::uint3 first{at.x * full.x, at.y * full.y, at.z * full.z};
  const metal::uint3 size{std::min(full.x, grid.x - first.x), std::min(full.y, grid.y - first.y),
                          std::min(full.z, grid.z - first.z)};
  const metal::uint3 groups{(grid.x + full.x - 1) / full.x, (grid.y + full.y - 1) / full.y, 0};
  made.threads = std::vector<Thread>(size_t(size.x) * size.y * size.z);
  uint32_t index = 0;
  for (uint32_t z = 0; z < size.z; ++z) {
    for (uint32_t y = 0; y < size.y; ++y) {
      for (uint32_t x = 0; x < size.x; ++x, ++index) {
        Thread& thread = made.threads[index];
        Position& position = thread.position;
        position.in_group = {x, y, z};
        position.in_grid = {first.x + x, first.y + y, first.z + z};
        position.group = at;
        position.group_size = size;
        position.index = index;
        const metal::uint3 p = position.in_grid;
        thread.actor.id = 1 + p.x + grid.x * (p.y + grid.y * p.z);
        thread.actor.group = at.x + groups.x * (at.y + groups.y * at.z);
        thread.actor.simdgroup = index / simd_width;
        thread.actor.position = p;
      }
    }
  }
}

static void check_written(const Buffer& buffer, Site site) {
  int64_t missing = 0, first = -1;
  const int64_t step = buffer.element_bytes;
  for (int64_t i = 0; i < int64_t(buffer.bytes.size()); i += step) {
    bool written = true;
    for (int64_t byte = i; byte < i + step; ++byte) written = written && buffer.writes[byte].thread != 0;
    if (!written) {
      first = first < 0 ? i / step : first;
      ++missing;
    }
  }
  if (missing > 0) {
    report("unwritten", site, "%lld of %lld elements of %s were not written, the first is [%lld]",
           static_cast<long long>(missing), static_cast<long long>(int64_t(buffer.bytes.size()) / step),
           buffer.name.c_str(), static_cast<long long>(first));
  }
}

static void run_grid(int64_t seed, const Program& program) {
  std::mt19937_64 random(seed);
  std::mt19937_64* shuffling = seed > 1 ? &random : nullptr;
  const metal::uint3 grid = request.grid, size = request.group;
  const uint32_t x = (grid.x + size.x - 1) / size.x, y = (grid.y + size.y - 1) / size.y;
  const uint32_t z = (grid.z + size.z - 1) / size.z;
  for (uint32_t number : order(x * y * z, shuffling, seed == 1)) {
    Group made;
    made.body = program.body;
    made.random = shuffling;
    made.reversed = seed == 1;
    made.fibers = program.fibers;
    place_threads(made, {number % x, number / x % y, number / x / y});
    group = &made;
    run_group();
    group = nullptr;
  }
}

int run(const char* outputs_path, const Program& program) {
  read_request(program);
  std::vector<std::vector<uint8_t>> first;
  for (size_t run = 0; run < request.seeds.size(); ++run) {
    // Other garbage each time, so that an element that is never written cannot look stable.
    for (auto& output : request.outputs) output->track(output->bytes.size(), uint8_t(0xc3 + 29 * run));
    run_grid(request.seeds[run], program);
    for (size_t i = 0; i < request.outputs.size(); ++i) {
      const Buffer& output = *request.outputs[i];
      check_written(output, program.kernel);
      if (run == 0) {
        first.push_back(output.bytes);
      }
      // Garbage that was read, say, differs from run to run whatever the order.
      if (run == 0 || has_findings()) {
        continue;
      }
      for (size_t byte = 0; byte < output.bytes.size(); ++byte) {
        if (output.bytes[byte] != first[i][byte] && output.writes[byte].thread != 0) {
          report("order-dependent", program.kernel, "%s[%lld] differs when the threads run in another order",
                 output.name.c_str(), static_cast<long long>(int64_t(byte) / output.element_bytes));
          break;
        }
      }
    }
  }
  std::FILE* file = std::fopen(outputs_path, "wb");
  if (file == nullptr) return 4;
  for (const auto& bytes : first) {
    if (!bytes.empty()) std::fwrite(bytes.data(), 1, bytes.size(), file);
  }
  std::fclose(file);
  print_findings();
  std::printf("done\n");
  return 0;
}

Buffer* input_buffer(int number) { return request.inputs[number].buffer.get(); }
Buffer* output_buffer(int number) { return request.outputs[number].get(); }
Buffer* shape_buffer(int number) { return request.inputs[number].shape.get(); }
Buffer* strides_buffer(int number) { return request.inputs[number].strides.get(); }
const int& ndim(int number) { return request.inputs[number].ndim; }
const void* scalar_bytes(int number) {
  const Buffer& buffer = *request.inputs[number].buffer;
  return buffer.bytes.data() + buffer.origin;
}

namespace attribute {
metal::uint3 thread_position_in_grid() { return self->position.in_grid; }
metal::uint3 thread_position_in_threadgroup() { return self->position.in_group; }
metal::uint3 threadgroup_position_in_grid() { return self->position.group; }
metal::uint3 threads_per_threadgroup() { return self->position.group_size; }
metal::uint3 dispatch_threads_per_threadgroup() { return request.group; }
metal::uint3 threads_per_grid() { return request.grid; }
metal::uint3 grid_size() { return request.grid; }
metal::uint3 grid_origin() { return {0, 0, 0}; }
metal::uint3 threadgroups_per_grid() {
  const metal::uint3 g = request.grid, t = request.group;
  return {(g.x + t.x - 1) / t.x, (g.y + t.y - 1) / t.y, (g.z + t.z - 1) / t.z};
}
uint32_t thread_index_in_threadgroup() { return self->position.index; }
uint32_t thread_index_in_simdgroup() { return self->position.index % simd_width; }
uint32_t simdgroup_index_in_threadgroup() { return self->position.index / simd_width; }
uint32_t thread_index_in_quadgroup() { return self->position.index % 4; }
uint32_t quadgroup_index_in_threadgroup() { return self->position.index / 4; }
static uint32_t threads_in(metal::uint3 size) { return size.x * size.y * size.z; }
uint32_t simdgroups_per_threadgroup() {
  return (threads_in(self->position.group_size) + simd_width - 1) / simd_width;
}
uint32_t dispatch_simdgroups_per_threadgroup() {
  return (threads_in(request.group) + simd_width - 1) / simd_width;
}
uint32_t quadgroups_per_threadgroup() { return (threads_in(self->position.group_size) + 3) / 4; }
uint32_t dispatch_quadgroups_per_threadgroup() { return (threads_in(request.group) + 3) / 4; }
uint32_t thread_execution_width() { return simd_width; }
uint32_t threads_per_simdgroup() { return simd_width; }
} // namespace attribute

} // namespace host
