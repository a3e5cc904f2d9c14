// Arrays that may be far larger than the memory of the machine, as long as little of them is used.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace host {

// Elements that begin as zero bytes; a page takes memory once it is written to.
template <typename T>
class Mapped {
 public:
  Mapped() = default;
  Mapped(const Mapped&) = delete;
  Mapped& operator=(const Mapped&) = delete;
  ~Mapped() { release(); }

  // `count` elements, all zero bytes.
  void reset(size_t count) {
    if (count == count_) {
      wipe();
      return;
    }
    release();
    count_ = count;
    if (count == 0) {
      return;
    }
    if (!is_mapped()) {
      data_ = static_cast<T*>(std::calloc(count, sizeof(T)));
      return;
    }
    void* found = mmap(
        nullptr, count * sizeof(T), PROT_READ | PROT_WRITE,
        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (found == MAP_FAILED) {
      std::perror("mmap");
      std::exit(5);
    }
    data_ = static_cast<T*>(found);
  }

  size_t size() const { return count_; }
  bool empty() const { return count_ == 0; }
  T* data() { return data_; }
  const T* data() const { return data_; }
  T& operator[](size_t i) { return data_[i]; }
  const T& operator[](size_t i) const { return data_[i]; }

 private:
  bool is_mapped() const { return count_ * sizeof(T) > (size_t(1) << 22); }
  void wipe() {
    if (count_ == 0) {
      return;
    }
    if (is_mapped()) {
      madvise(data_, count_ * sizeof(T), MADV_DONTNEED);
    } else {
      std::memset(static_cast<void*>(data_), 0, count_ * sizeof(T));
    }
  }
  void release() {
    if (data_ != nullptr) {
      is_mapped() ? void(munmap(data_, count_ * sizeof(T))) : std::free(data_);
    }
    data_ = nullptr;
    count_ = 0;
  }

  T* data_ = nullptr;
  size_t count_ = 0;
};

} // namespace host
