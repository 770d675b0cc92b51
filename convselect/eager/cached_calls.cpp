// Cached calls outside Python: the key of a call, its plan, the C kernel and the autograd node.
//
// `Cache` is a callable in place of the dispatch function in Python (`eager/dispatch.py`), which stays the one that knows
// everything: trials, failures, modes, vmap, whatever is new or rare. A call that this file does not recognise goes
// there, and is then described to it (`eager/cached.py`), so that the next of its kind stays here. Nothing here decides:
// what runs was chosen in Python, and any doubt (a status other than success, an exception, an unusual tensor, a check
// that is due) sends the call back to Python, which computes it again from the beginning.
//
// A key holds everything that may change the answer, as words: sizes, strides, types and key sets of the three operands
// (a tensor's dispatch key set tells subclasses, wrappers, lazy negation, other devices), the geometry, and the state of
// the thread and the process. The thread's own key sets tell modes, tracers, transforms, autocast and inference mode.

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/conv1d.h>
#include <ATen/ops/conv2d.h>
#include <ATen/ops/conv_transpose1d.h>
#include <ATen/ops/conv_transpose2d.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/version.h>

#include <array>
#include <atomic>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <cmath>
#include <vector>

namespace {

using at::Tensor;
using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;
using NodePtr = decltype(torch::autograd::Edge::function);  // std::shared_ptr or, later, c10::intrusive_ptr

// ---- what calls to C kernels and to Python need -------------------------------------------------------------------

// `cs_epilogue` of kernels/csrc/convselect.h.
struct Epilogue {
  const void* bias;
  const void* residual;
  int32_t activation;
  float parameter;
};

struct Owned {  // a reference to a Python object, given back with the GIL held
  PyObject* object = nullptr;
  Owned() = default;
  explicit Owned(PyObject* borrowed) : object(borrowed) { Py_XINCREF(object); }
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;
  ~Owned() {
    if (object == nullptr || !Py_IsInitialized()) return;
    PyGILState_STATE state = PyGILState_Ensure();
    Py_DECREF(object);
    PyGILState_Release(state);
  }
};

struct WithGil {
  PyGILState_STATE state = PyGILState_Ensure();
  ~WithGil() { PyGILState_Release(state); }
};

struct WithoutGil {
  PyThreadState* state = PyEval_SaveThread();
  ~WithoutGil() { PyEval_RestoreThread(state); }
};

// Calls that may run here before Python has to see one: it counts down to checks of results, and to the release of an
// idle model. Shared by all caches and threads; a count lost between two of them does no harm.
std::atomic<int64_t> budget{0};
std::atomic<int64_t> consumed{0};
// Entries of an earlier generation may name what is not chosen any more.
std::atomic<uint64_t> generation{0};

// One direction by one C kernel, or by aten.
struct Recipe {
  bool native = true;
  bool counted = false;  // whether its results are checked now and then: not if the user has named the algorithm
  void* function = nullptr;
  std::vector<int32_t> leading;
  std::vector<int64_t> conv;  // `cs_conv`, in words so that it is aligned
  at::ScalarType dtype = at::kFloat;
  std::vector<int64_t> shape, made, strides;  // of the result; strides as the kernel makes it, and as aten's is
  bool adds_bias = true;                      // the kernel itself
  bool a_last = false, b_last = false;        // layouts of the operands: channels_last or contiguous
};

constexpr int kWords = 56;

struct Key {
  std::array<uint64_t, kWords> words{};
  int count = 0;
  void add(uint64_t word) {
    if (count < kWords) words[count] = word;
    ++count;
  }
  bool operator==(const Key& other) const {
    return count == other.count && std::memcmp(words.data(), other.words.data(), sizeof(uint64_t) * count) == 0;
  }
};

struct Hash {
  size_t operator()(const Key& key) const {
    uint64_t h = 0x9E3779B97F4A7C15ull;
    for (int i = 0; i < key.count; ++i) {
      h = (h ^ key.words[i]) * 0xFF51AFD7ED558CCDull;
      h ^= h >> 32;
    }
    return h;
  }
};

struct Kind {
  int dims = 2;
  bool transposed = false;
};

// What a backward call is recognised by; small, so compared one by one.
struct BackwardKey {
  std::array<int64_t, 4> strides{};
  uint64_t needed = 0, threads = 0, flags = 0;
  bool operator==(const BackwardKey& o) const {
    return strides == o.strides && needed == o.needed && threads == o.threads && flags == o.flags;
  }
};

struct Backward {
  BackwardKey key;
  Recipe data, weight;
};

constexpr size_t kMostBackwards = 16;
constexpr int kMostPatience = 32;

struct Entry {
  // Calls until Python has to look at it again: none, while it is not described; unlimited if negative.
  int64_t left = 0;
  int patience = 2, misses = 0;  // a call is described after so many misses, twice as many each time
  bool described = false, native = false, needs_grad = false, watches = false;
  Owned plan;
  Owned settings;  // the key has their address, which nothing else may have meanwhile
  Recipe forward;
  Kind kind;
  std::vector<int64_t> stride, padding, dilation, output_padding;
  int64_t groups = 1;
  bool same = false;  // padding="same"
  uint64_t made_in = generation.load();
  std::mutex mutex;  // of what follows
  std::vector<std::shared_ptr<const Backward>> backwards;
  int backward_patience = 1, backward_misses = 0;
  Entry(PyObject* plan_, PyObject* settings_) : plan(plan_), settings(settings_) {}
};

struct Statics {
  PyObject* parameter = nullptr;       // the class
  PyObject* override_ = nullptr;       // the context variable of `use`
  PyObject* settings_dict = nullptr;   // where `_default` is
  PyObject* default_name = nullptr;
  PyObject* forward_ad_dict = nullptr;
  PyObject* level_name = nullptr;
  PyObject* precision = nullptr;       // torch._C._get_fp32_precision_getter
  PyObject* mkldnn_name = nullptr;
  PyObject* conv_name = nullptr;
  PyObject* refill = nullptr;          // (calls made here) -> calls that may follow
  PyObject* describe_backward = nullptr;
  PyObject* gradients = nullptr;       // (plan, grad_y, x, weight, needed) -> the three of them
} statics;

bool take_from_budget(int64_t calls) {
  if (calls == 0) return true;
  if (budget.fetch_sub(calls, std::memory_order_relaxed) < calls) return false;
  consumed.fetch_add(calls, std::memory_order_relaxed);
  return true;
}

void refill() {  // with the GIL
  PyObject* left = PyObject_CallFunction(statics.refill, "L", (long long)consumed.exchange(0));
  if (left == nullptr) {
    PyErr_Clear();
    return;
  }
  budget.store(PyLong_AsLongLong(left));
  if (PyErr_Occurred()) PyErr_Clear();
  Py_DECREF(left);
}

// ---- running -----------------------------------------------------------------------------------------------------

bool is_plain(const Tensor& t) {
  constexpr auto allowed = c10::DispatchKeySet(
      {c10::DispatchKey::CPU, c10::DispatchKey::ADInplaceOrView, c10::DispatchKey::AutogradCPU,
       c10::DispatchKey::AutocastCPU});
  // As bits: the difference of sets keeps the bit of the backend.
  return (t.key_set().raw_repr() & ~allowed.raw_repr()) == 0 && t.device().is_cpu() && t.layout() == at::kStrided;
}

// No mode, tracer or transform is active.
bool thread_is_plain() {
  return (c10::impl::tls_local_dispatch_key_set().included_.raw_repr() & ~c10::default_included_set.raw_repr()) == 0;
}

at::MemoryFormat format(bool last) { return last ? at::MemoryFormat::ChannelsLast : at::MemoryFormat::Contiguous; }

Tensor with_strides(const Tensor& made, at::IntArrayRef strides) {
  if (made.strides() == strides) return made;
  bool same = true;
  for (int64_t d = 0; d < made.dim(); ++d) same = same && (made.size(d) == 1 || made.stride(d) == strides[d]);
  if (same && made.storage_offset() == 0) {
    made.unsafeGetTensorImpl()->set_sizes_and_strides(made.sizes(), strides);
    return made;
  }
  Tensor moved = at::empty_strided(made.sizes(), strides, made.options());
  return moved.copy_(made);
}

// The result; undefined if the kernel has none to offer. Below autograd.
Tensor run_kernel(const Recipe& recipe, const Tensor& a_, const Tensor& b_, const Tensor& bias) {
  const Tensor a = a_.contiguous(format(recipe.a_last)), b = b_.contiguous(format(recipe.b_last));
  Tensor out = at::empty_strided(recipe.shape, recipe.made, a.options());
  const bool fused = bias.defined() && recipe.adds_bias;
  Epilogue epilogue{fused ? bias.data_ptr() : nullptr, nullptr, 0, 0.0f};
  const void* more = fused ? &epilogue : nullptr;
  const void *conv = recipe.conv.data(), *pa = a.const_data_ptr(), *pb = b.const_data_ptr();
  void* po = out.mutable_data_ptr();
  int32_t status;
  switch (recipe.leading.size()) {
    case 0:
      status = reinterpret_cast<int32_t (*)(const void*, const void*, const void*, void*, const void*)>(
          recipe.function)(conv, pa, pb, po, more);
      break;
    case 1:
      status = reinterpret_cast<int32_t (*)(const void*, int32_t, const void*, const void*, void*, const void*)>(
          recipe.function)(conv, recipe.leading[0], pa, pb, po, more);
      break;
    default:
      status =
          reinterpret_cast<int32_t (*)(const void*, int32_t, int32_t, const void*, const void*, void*, const void*)>(
              recipe.function)(conv, recipe.leading[0], recipe.leading[1], pa, pb, po, more);
  }
  if (status != 0) return Tensor();
  if (bias.defined() && !fused) {
    std::vector<int64_t> size(out.dim() - 1, 1);
    size[0] = -1;
    out.add_(bias.view(size));
  }
  return with_strides(out, recipe.strides);
}

Tensor native_forward(const Entry& e, const Tensor& x, const Tensor& weight, const Tensor& bias) {
  std::optional<Tensor> b = bias.defined() ? std::optional<Tensor>(bias) : std::nullopt;
  if (e.kind.transposed) {
    if (e.kind.dims == 1)
      return at::conv_transpose1d(x, weight, b, e.stride, e.padding, e.output_padding, e.groups, e.dilation);
    return at::conv_transpose2d(x, weight, b, e.stride, e.padding, e.output_padding, e.groups, e.dilation);
  }
  if (e.kind.dims == 1) {
    if (e.same) return at::conv1d(x, weight, b, e.stride, c10::string_view("same"), e.dilation, e.groups);
    return at::conv1d(x, weight, b, e.stride, e.padding, e.dilation, e.groups);
  }
  if (e.same) return at::conv2d(x, weight, b, e.stride, c10::string_view("same"), e.dilation, e.groups);
  return at::conv2d(x, weight, b, e.stride, e.padding, e.dilation, e.groups);
}

// The gradients, as aten's own, of the convolution that maps x to y; those not in the mask are undefined.
std::tuple<Tensor, Tensor, Tensor> native_backward(const Entry& e, const Tensor& grad_y, const Tensor& x,
                                                   const Tensor& weight, std::array<bool, 3> mask) {
  const std::vector<int64_t> filters = {weight.size(0)}, none(e.kind.dims, 0);
  return at::convolution_backward(grad_y, x, weight, mask[2] ? at::OptionalIntArrayRef(filters) : at::OptionalIntArrayRef(),
                                  e.stride, e.padding, e.dilation, false, none, e.groups, mask);
}

// What no transform may take (`wants_direct_sums`) shows no negative value, no fraction, or a single value. False is
// certain: all three were seen in the first 16 elements. True: Python has to look.
bool needs_a_look(const Tensor& weight) {
  constexpr int64_t kFirst = 16;
  constexpr float kGrain = 256.0f;
  if (weight.scalar_type() != at::kFloat || weight.numel() < kFirst || !weight.is_non_overlapping_and_dense()) return true;
  const float* first = weight.const_data_ptr<float>();
  const int64_t filter = weight.numel() / weight.size(0), one = filter < kFirst ? filter : kFirst;
  bool negative = false, fraction = false, differs = false;
  for (int64_t i = 0; i < kFirst; ++i) {
    const float scaled = first[i] * kGrain;
    negative |= first[i] < 0;
    fraction |= scaled != std::nearbyint(scaled);
    differs |= i < one && first[i] != first[0];
  }
  return !(negative && fraction && differs);
}

// ---- autograd ----------------------------------------------------------------------------------------------------

struct ConvNode : public Node {
  std::shared_ptr<Entry> entry;
  SavedVariable x, weight;

  std::string name() const override {
    return entry->kind.transposed ? "ConvTransposeFunctionBackward" : "Conv2dFunctionBackward";
  }

  void release_variables() override {
    x.reset_data();
    weight.reset_data();
  }

  variable_list apply(variable_list&& grads) override {
    const Tensor grad_y = grads[0];
    if (!grad_y.defined()) return variable_list(3);
    const Tensor saved_x = x.unpack(), saved_weight = weight.unpack();
    const std::array<bool, 3> needed = {
        task_should_compute_output(0), task_should_compute_output(1), task_should_compute_output(2)};
    const bool usual = thread_is_plain() && is_plain(grad_y) && is_plain(saved_x) && is_plain(saved_weight) &&
                       !at::impl::torch_function_mode_enabled();
    if (at::GradMode::is_enabled() || !usual)
      return by_python(grad_y, saved_x, saved_weight, needed);
    BackwardKey key;
    const int dims = entry->kind.dims + 2;
    const bool fits = grad_y.dim() == dims && grad_y.scalar_type() == saved_x.scalar_type() &&
                      entry->made_in == generation.load();
    if (fits) {
      for (int d = 0; d < dims; ++d) key.strides[d] = grad_y.stride(d);
      key.needed = needed[0] + 2 * needed[1] + 4 * needed[2];
      key.threads = at::get_num_threads();
      const auto& context = at::globalContext();
      key.flags = context.deterministicAlgorithms() + 2 * context.userEnabledMkldnn();
      std::shared_ptr<const Backward> found;
      {
        std::lock_guard<std::mutex> hold(entry->mutex);
        for (const auto& one : entry->backwards)
          if (one->key == key) found = one;
      }
      if (found && take_from_budget(found->data.counted + found->weight.counted)) {
        variable_list result(3);
        bool right = false;
        try {
          right = compute(*found, grad_y, saved_x, saved_weight, needed, result);
        } catch (const std::exception&) {
        }
        if (right) return result;
        forget();
      }
    }
    variable_list result = by_python(grad_y, saved_x, saved_weight, needed);
    if (fits) describe(key, grad_y, saved_x, saved_weight);
    return result;
  }

  void forget() {
    std::lock_guard<std::mutex> hold(entry->mutex);
    entry->backwards.clear();
  }

  bool compute(const Backward& found, const Tensor& grad_y, const Tensor& saved_x, const Tensor& saved_weight,
               const std::array<bool, 3>& needed, variable_list& result) {
    at::AutoDispatchBelowADInplaceOrView below;
    if (entry->kind.transposed) {
      // The gradients are the other two maps of the convolution the other way round, which streams grad_y.
      if (needed[0])
        result[0] = found.data.native ? with_strides(mirrored(grad_y, saved_weight), found.data.strides)
                                      : run_kernel(found.data, grad_y, saved_weight, Tensor());
      if (needed[1])
        result[1] = found.weight.native
                        ? with_strides(std::get<1>(native_backward(*entry, saved_x, grad_y, saved_weight, {false, true, false})),
                                       found.weight.strides)
                        : run_kernel(found.weight, grad_y, saved_x, Tensor());
      if (needed[2]) result[2] = sum_per_channel(grad_y);
      return (!needed[0] || result[0].defined()) && (!needed[1] || result[1].defined());
    }
    if (needed[0] && !found.data.native) {
      result[0] = run_kernel(found.data, grad_y, saved_weight, Tensor());
      if (!result[0].defined()) return false;
    }
    if (needed[1] && !found.weight.native) {
      result[1] = run_kernel(found.weight, saved_x, grad_y, Tensor());
      if (!result[1].defined()) return false;
    }
    const bool by_x = needed[0] && found.data.native, by_weight = needed[1] && found.weight.native;
    if (by_x || by_weight) {
      const std::array<bool, 3> mask = {by_x, by_weight, by_weight && needed[2]};
      auto [gx, gw, gb] = native_backward(*entry, grad_y, saved_x, saved_weight, mask);
      if (by_x) result[0] = with_strides(gx, found.data.strides);
      if (by_weight) result[1] = with_strides(gw, found.weight.strides);
      if (mask[2]) result[2] = gb;
    }
    if (needed[2] && !result[2].defined()) result[2] = sum_per_channel(grad_y);
    return true;
  }

  static Tensor sum_per_channel(const Tensor& grad_y) {
    return grad_y.dim() == 3 ? grad_y.sum({0, 2}) : grad_y.sum({0, 2, 3});
  }

  Tensor mirrored(const Tensor& grad_y, const Tensor& saved_weight) {
    const Entry& e = *entry;
    return e.kind.dims == 1 ? at::conv1d(grad_y, saved_weight, {}, e.stride, e.padding, e.dilation, e.groups)
                            : at::conv2d(grad_y, saved_weight, {}, e.stride, e.padding, e.dilation, e.groups);
  }

  variable_list by_python(const Tensor& grad_y, const Tensor& saved_x, const Tensor& saved_weight,
                          const std::array<bool, 3>& needed) {
    WithGil gil;
    refill();
    PyObject* tensors[3] = {THPVariable_Wrap(grad_y), THPVariable_Wrap(saved_x), THPVariable_Wrap(saved_weight)};
    PyObject* found = PyObject_CallFunction(
        statics.gradients, "OOOO(OOO)", entry->plan.object, tensors[0], tensors[1], tensors[2], truth(needed[0]), truth(needed[1]),
        truth(needed[2]));
    for (PyObject* t : tensors) Py_XDECREF(t);
    if (found == nullptr) throw python_error_here();
    variable_list result(3);
    for (int i = 0; i < 3; ++i) {
      PyObject* one = PyTuple_GetItem(found, i);
      if (one != nullptr && one != Py_None && needed[i]) result[i] = THPVariable_Unpack(one);
    }
    Py_DECREF(found);
    refill();
    return result;
  }

  static PyObject* truth(bool value) { return value ? Py_True : Py_False; }

  static python_error python_error_here() {
    python_error error;
    error.persist();
    return error;
  }

  void describe(const BackwardKey& key, const Tensor& grad_y, const Tensor& saved_x, const Tensor& saved_weight);
};

// ---- descriptions ------------------------------------------------------------------------------------------------

bool ints_of(PyObject* sequence, std::vector<int64_t>& into) {
  PyObject* fast = PySequence_Fast(sequence, "");
  if (fast == nullptr) return false;
  into.clear();
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(fast); ++i)
    into.push_back(PyLong_AsLongLong(PySequence_Fast_GET_ITEM(fast, i)));
  Py_DECREF(fast);
  return !PyErr_Occurred();
}

// (strides,) for aten; (function, leading, conv, shape, made, strides, a_last, b_last, counted,
// adds_bias) for a kernel.
bool recipe_of(PyObject* given, Recipe& into) {
  if (!PyTuple_Check(given)) return false;
  if (PyTuple_GET_SIZE(given) == 1) return ints_of(PyTuple_GET_ITEM(given, 0), into.strides);
  unsigned long long function;
  PyObject *leading, *shape, *made, *strides;
  const char* conv;
  Py_ssize_t bytes;
  int a_last, b_last, counted, adds_bias;
  if (!PyArg_ParseTuple(given, "KOy#OOOpppp", &function, &leading, &conv, &bytes, &shape, &made, &strides, &a_last,
                        &b_last, &counted, &adds_bias))
    return false;
  std::vector<int64_t> ints;
  if (!ints_of(leading, ints) || ints.size() > 2 || !ints_of(shape, into.shape) || !ints_of(made, into.made) ||
      !ints_of(strides, into.strides))
    return false;
  into.leading.assign(ints.begin(), ints.end());
  into.conv.resize((bytes + 7) / 8);
  std::memcpy(into.conv.data(), conv, bytes);
  into.function = reinterpret_cast<void*>(function);
  into.a_last = a_last;
  into.b_last = b_last;
  into.counted = counted;
  into.adds_bias = adds_bias;
  into.native = false;
  return true;
}

void ConvNode::describe(const BackwardKey& key, const Tensor& grad_y, const Tensor& saved_x, const Tensor& saved_weight) {
  {
    std::lock_guard<std::mutex> hold(entry->mutex);
    if (++entry->backward_misses < entry->backward_patience || entry->backwards.size() >= kMostBackwards) return;
    entry->backward_misses = 0;
    entry->backward_patience = std::min(2 * entry->backward_patience, kMostPatience);
  }
  WithGil gil;
  PyObject* tensors[3] = {THPVariable_Wrap(grad_y), THPVariable_Wrap(saved_x), THPVariable_Wrap(saved_weight)};
  PyObject* found = PyObject_CallFunction(
      statics.describe_backward, "OOOO(ii)", entry->plan.object, tensors[0], tensors[1], tensors[2],
      (int)(key.needed & 1), (int)((key.needed >> 1) & 1));
  for (PyObject* t : tensors) Py_XDECREF(t);
  auto made = std::make_shared<Backward>();
  made->key = key;
  PyObject *data, *weight;
  if (found != nullptr && found != Py_None && PyArg_ParseTuple(found, "OO", &data, &weight) &&
      (data == Py_None || recipe_of(data, made->data)) && (weight == Py_None || recipe_of(weight, made->weight))) {
    std::lock_guard<std::mutex> hold(entry->mutex);
    entry->backwards.push_back(made);
  }
  if (PyErr_Occurred()) PyErr_WriteUnraisable(statics.describe_backward);
  Py_XDECREF(found);
}

// ---- the callable ------------------------------------------------------------------------------------------------

struct Cache {
  PyObject_HEAD
  PyObject* slow;      // the dispatch function in Python
  PyObject* describe;  // (plan, x, weight, bias, geometry) -> None or a description
  vectorcallfunc vectorcall;
  std::unordered_map<Key, std::shared_ptr<Entry>, Hash>* entries;
  std::deque<Key>* order;  // of insertion: the oldest half goes when there are too many
  Py_ssize_t capacity;
  Kind kind;
};

bool is_plain_class(PyObject* object) {
  PyTypeObject* type = Py_TYPE(object);
  return type == (PyTypeObject*)THPVariableClass || type == (PyTypeObject*)statics.parameter;
}

void add_tensor(Key& key, const Tensor& t) {
  const auto sizes = t.sizes(), strides = t.strides();
  key.add(sizes.size());
  for (size_t d = 0; d < sizes.size(); ++d) {
    key.add(sizes[d]);
    key.add(strides[d]);
  }
  key.add(t.key_set().raw_repr());
  key.add((uint64_t)t.scalar_type() << 1 | (uint64_t)t.requires_grad());
}

bool add_ints(Key& key, PyObject* object) {
  if (!PyTuple_CheckExact(object)) return false;
  const Py_ssize_t n = PyTuple_GET_SIZE(object);
  key.add(n);
  for (Py_ssize_t i = 0; i < n; ++i) {
    PyObject* item = PyTuple_GET_ITEM(object, i);
    if (!PyLong_CheckExact(item)) return false;
    int overflow = 0;
    key.add(PyLong_AsLongLongAndOverflow(item, &overflow));
    if (overflow != 0) return false;
  }
  return true;
}

// (stride, padding, dilation, groups), padding may be "same"; (stride, padding, output_padding, groups, dilation) if
// transposed.
bool add_geometry(Key& key, PyObject* geometry, bool transposed) {
  if (!PyTuple_CheckExact(geometry) || PyTuple_GET_SIZE(geometry) != 4 + transposed) return false;
  PyObject *padding = PyTuple_GET_ITEM(geometry, 1), *groups = PyTuple_GET_ITEM(geometry, 3);
  if (!add_ints(key, PyTuple_GET_ITEM(geometry, 0)) || !add_ints(key, PyTuple_GET_ITEM(geometry, 2))) return false;
  if (transposed && !add_ints(key, PyTuple_GET_ITEM(geometry, 4))) return false;
  if (PyUnicode_Check(padding)) {
    if (PyUnicode_CompareWithASCIIString(padding, "same") != 0) return false;
    key.add(~0ull);
  } else if (!add_ints(key, padding)) {
    return false;
  }
  if (!PyLong_CheckExact(groups)) return false;
  int overflow = 0;
  key.add(PyLong_AsLongLongAndOverflow(groups, &overflow));
  return overflow == 0;
}

PyObject* settings_in_force() {  // borrowed; null without an exception if unknown
  PyObject* found = nullptr;
  if (PyContextVar_Get(statics.override_, nullptr, &found) < 0) {
    PyErr_Clear();
    return nullptr;
  }
  if (found != nullptr && found != Py_None) {
    Py_DECREF(found);  // the context holds it, and settings are interned
    return found;
  }
  Py_XDECREF(found);
  return PyDict_GetItem(statics.settings_dict, statics.default_name);
}

bool add_state(Key& key, PyObject* policy) {
  PyObject* settings = settings_in_force();
  if (settings == nullptr) return false;
  key.add((uint64_t)settings);
  if (policy == Py_None) {
    key.add(0);
  } else {
    if (!PyUnicode_CheckExact(policy)) return false;
    const Py_hash_t hash = PyObject_Hash(policy);
    key.add(hash == 0 ? 1 : (uint64_t)hash);
  }
  const auto tls = c10::impl::tls_local_dispatch_key_set();
  key.add(tls.included_.raw_repr());
  key.add(tls.excluded_.raw_repr());
  const bool casts = !tls.excluded_.has(c10::DispatchKey::AutocastCPU);
  key.add(casts ? 1 + (uint64_t)at::autocast::get_autocast_dtype(at::kCPU) : 0);
  const auto& context = at::globalContext();
  key.add((uint64_t)at::GradMode::is_enabled() | (uint64_t)context.deterministicAlgorithms() << 1 |
          (uint64_t)context.userEnabledMkldnn() << 2);
  key.add(at::get_num_threads());
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 13
  key.add((uint64_t)context.float32Precision(at::Float32Backend::MKLDNN, at::Float32Op::CONV));
#else
  PyObject* arguments[2] = {statics.mkldnn_name, statics.conv_name};
  PyObject* precision = PyObject_Vectorcall(statics.precision, arguments, 2, nullptr);
  if (precision == nullptr) {
    PyErr_Clear();
    return false;
  }
  key.add((uint64_t)PyObject_Hash(precision));
  Py_DECREF(precision);
#endif
  return true;
}

bool forward_ad_is_active() {
  PyObject* level = PyDict_GetItem(statics.forward_ad_dict, statics.level_name);
  return level == nullptr || !PyLong_CheckExact(level) || PyLong_AsLong(level) >= 0;
}

PyObject* by_python(Cache* self, PyObject* const* args, Py_ssize_t nargs, PyObject* seen) {
  PyObject* all[6] = {nullptr, nullptr, nullptr, nullptr, Py_None, seen};
  for (Py_ssize_t i = 0; i < nargs && i < 5; ++i) all[i] = args[i];
  if (seen == nullptr) return PyObject_Vectorcall(self->slow, args, nargs, nullptr);
  return PyObject_Vectorcall(self->slow, all, 6, nullptr);
}

void keep(Cache* self, const Key& key, std::shared_ptr<Entry> entry) {
  if (self->capacity <= 0) return;
  if (self->entries->find(key) == self->entries->end()) {
    if ((Py_ssize_t)self->entries->size() >= self->capacity) {
      for (size_t half = self->order->size() / 2; half > 0; --half) {
        self->entries->erase(self->order->front());
        self->order->pop_front();
      }
    }
    self->order->push_back(key);
  }
  (*self->entries)[key] = std::move(entry);
}

// None: Python's business. (calls, None) for aten's own; (calls, plan, recipe, needs_grad, watches) for a plan.
std::shared_ptr<Entry> entry_of(PyObject* given, PyObject* geometry, Kind kind, PyObject* settings) {
  PyObject *plan, *recipe = nullptr;
  long long left;
  int needs_grad = 0, watches = 0;
  if (!PyArg_ParseTuple(given, "LO|Opp", &left, &plan, &recipe, &needs_grad, &watches)) return nullptr;
  auto entry = std::make_shared<Entry>(plan == Py_None ? nullptr : plan, settings);
  entry->left = left;
  entry->described = true;
  entry->native = plan == Py_None;
  entry->needs_grad = needs_grad;
  entry->watches = watches;
  entry->kind = kind;
  PyObject *padding = PyTuple_GET_ITEM(geometry, 1), *dilation = PyTuple_GET_ITEM(geometry, kind.transposed ? 4 : 2);
  entry->same = PyUnicode_Check(padding);
  if (!ints_of(PyTuple_GET_ITEM(geometry, 0), entry->stride) || !ints_of(dilation, entry->dilation)) return nullptr;
  if (kind.transposed && !ints_of(PyTuple_GET_ITEM(geometry, 2), entry->output_padding)) return nullptr;
  if (!entry->same && !ints_of(padding, entry->padding)) return nullptr;
  entry->groups = PyLong_AsLongLong(PyTuple_GET_ITEM(geometry, 3));
  if (!entry->native && (recipe == nullptr || !recipe_of(recipe, entry->forward))) return nullptr;
  return PyErr_Occurred() ? nullptr : entry;
}

// Python computes the call; what it did is described to us now and then.
PyObject* missed(Cache* self, const Key& key, std::shared_ptr<Entry> entry, PyObject* const* args, Py_ssize_t nargs) {
  if (!entry) {
    entry = std::make_shared<Entry>(nullptr, settings_in_force());
    keep(self, key, entry);
  }
  const bool ask = ++entry->misses >= entry->patience && thread_is_plain();
  PyObject* seen = ask ? PyList_New(0) : nullptr;
  if (ask && seen == nullptr) return nullptr;
  PyObject* result = by_python(self, args, nargs, seen);
  if (seen == nullptr) return result;
  if (result != nullptr && PyList_GET_SIZE(seen) == 1) {
    entry->misses = 0;
    entry->patience = std::min(2 * entry->patience, kMostPatience);
    PyObject* found = PyObject_CallFunctionObjArgs(
        self->describe, PyList_GET_ITEM(seen, 0), args[0], args[1], args[2], args[3], nullptr);
    if (found != nullptr && found != Py_None) {
      auto made = entry_of(found, args[3], self->kind, entry->settings.object);
      if (made) keep(self, key, std::move(made));
    }
    if (PyErr_Occurred()) PyErr_WriteUnraisable(self->describe);
    Py_XDECREF(found);
  }
  Py_DECREF(seen);
  return result;
}

// A template, so that only the branch for this version of PyTorch is compiled.
template <class Pointer, class Made = ConvNode>
Pointer new_node(Made*& node) {
  if constexpr (std::is_same_v<Pointer, std::shared_ptr<Node>>) {
    node = new Made();
    return Pointer(static_cast<Node*>(node), [](auto* old) { deleteNode(old); });
  } else {
    auto made = c10::make_intrusive<Made>();
    node = made.get();
    return made;
  }
}

// The result; an undefined tensor if Python has to compute it.
Tensor by_plan(const std::shared_ptr<Entry>& entry, const Tensor& x, const Tensor& weight, const Tensor& bias) {
  const bool differentiable = entry->needs_grad;
  Tensor y;
  {
    at::AutoDispatchBelowADInplaceOrView below;
    y = entry->forward.native ? with_strides(native_forward(*entry, x, weight, bias), entry->forward.strides)
                              : run_kernel(entry->forward, x, weight, bias);
  }
  if (!y.defined() || !differentiable) return y;
  ConvNode* node;
  const NodePtr made = new_node<NodePtr>(node);
  node->set_next_edges(torch::autograd::collect_next_edges(x, weight, bias));
  node->entry = entry;
  node->x = SavedVariable(x, false);
  node->weight = SavedVariable(weight, false);
  torch::autograd::set_history(y, made);
  return y;
}

PyObject* call(PyObject* callable, PyObject* const* args, size_t nargsf, PyObject* names) {
  Cache* self = (Cache*)callable;
  const Py_ssize_t nargs = PyVectorcall_NARGS(nargsf);
  if (names != nullptr && PyTuple_GET_SIZE(names) > 0) return PyObject_Vectorcall(self->slow, args, nargsf, names);
  if (nargs < 4 || nargs > 5 || !is_plain_class(args[0]) || !is_plain_class(args[1]) ||
      !(args[2] == Py_None || is_plain_class(args[2])) || at::impl::torch_function_mode_enabled())
    return by_python(self, args, nargs, nullptr);
  const Tensor& x = THPVariable_Unpack(args[0]);
  const Tensor& weight = THPVariable_Unpack(args[1]);
  const Tensor bias = args[2] == Py_None ? Tensor() : THPVariable_Unpack(args[2]);
  const int dims = self->kind.dims + 2;
  if (x.dim() != dims || weight.dim() != dims || !is_plain(x) || !is_plain(weight) ||
      (bias.defined() && (bias.dim() != 1 || !is_plain(bias))))
    return by_python(self, args, nargs, nullptr);
  Key key;
  add_tensor(key, x);
  add_tensor(key, weight);
  if (bias.defined()) {
    add_tensor(key, bias);
  } else {
    key.add(~0ull);
  }
  PyObject* policy = nargs > 4 ? args[4] : Py_None;
  if (!add_geometry(key, args[3], self->kind.transposed) || !add_state(key, policy) || key.count > kWords)
    return by_python(self, args, nargs, nullptr);
  auto at = self->entries->find(key);
  if (at == self->entries->end()) return missed(self, key, nullptr, args, nargs);
  const std::shared_ptr<Entry> entry = at->second;  // another thread may clear the cache meanwhile
  if (entry->left == 0) return missed(self, key, entry, args, nargs);
  if (entry->left > 0) --entry->left;
  Tensor y;
  if (entry->native) {
    try {
      WithoutGil released;
      y = native_forward(*entry, x, weight, bias);
    } catch (python_error& error) {  // raised by a hook on saved tensors
      error.restore();
      return nullptr;
    } catch (const std::exception&) {  // Python's call raises what PyTorch raises, or finds more memory
    }
  } else {
    if ((entry->watches && needs_a_look(weight)) || forward_ad_is_active()) return by_python(self, args, nargs, nullptr);
    if (!take_from_budget(entry->forward.counted)) {
      refill();
      PyObject* result = by_python(self, args, nargs, nullptr);
      refill();
      return result;
    }
    try {
      WithoutGil released;
      y = by_plan(entry, x, weight, bias);
    } catch (python_error& error) {
      error.restore();
      return nullptr;
    } catch (const std::exception&) {
    }
    if (!y.defined()) self->entries->erase(key), entry->left = 0;
  }
  if (!y.defined()) return by_python(self, args, nargs, nullptr);
  return THPVariable_Wrap(std::move(y));
}

// ---- the module --------------------------------------------------------------------------------------------------

PyObject* clear(Cache* self, PyObject*) {
  // Plans may be freed by this, and run anything: first let go of the containers.
  generation.fetch_add(1);
  auto entries = std::move(*self->entries);
  self->entries->clear();
  self->order->clear();
  entries.clear();
  Py_RETURN_NONE;
}

PyObject* length(Cache* self, PyObject*) { return PyLong_FromSize_t(self->entries->size()); }

int initialise(Cache* self, PyObject* args, PyObject*) {
  int transposed;
  if (!PyArg_ParseTuple(args, "OOnip", &self->slow, &self->describe, &self->capacity, &self->kind.dims, &transposed))
    return -1;
  self->kind.transposed = transposed;
  Py_INCREF(self->slow);
  Py_INCREF(self->describe);
  self->entries = new std::unordered_map<Key, std::shared_ptr<Entry>, Hash>();
  self->order = new std::deque<Key>();
  self->vectorcall = call;
  return 0;
}

void free_cache(Cache* self) {
  delete self->entries;
  delete self->order;
  Py_XDECREF(self->slow);
  Py_XDECREF(self->describe);
  Py_TYPE(self)->tp_free((PyObject*)self);
}

PyMethodDef cache_methods[] = {
    {"clear", (PyCFunction)clear, METH_NOARGS, "Forget all calls."},
    {"count", (PyCFunction)length, METH_NOARGS, "How many kinds of calls are kept."},
    {nullptr, nullptr, 0, nullptr}};

PyTypeObject CacheType = {PyVarObject_HEAD_INIT(nullptr, 0)};

PyObject* set_up(PyObject*, PyObject* args) {
  PyObject* torch_precision = nullptr;
  if (!PyArg_ParseTuple(args, "OOOOOOOO", &statics.parameter, &statics.override_, &statics.settings_dict,
                        &statics.forward_ad_dict, &torch_precision, &statics.refill, &statics.describe_backward,
                        &statics.gradients))
    return nullptr;
  statics.precision = torch_precision;
  for (PyObject* object : {statics.parameter, statics.override_, statics.settings_dict, statics.forward_ad_dict,
                           statics.precision, statics.refill, statics.describe_backward, statics.gradients})
    Py_INCREF(object);
  statics.default_name = PyUnicode_InternFromString("_default");
  statics.level_name = PyUnicode_InternFromString("_current_level");
  statics.mkldnn_name = PyUnicode_InternFromString("mkldnn");
  statics.conv_name = PyUnicode_InternFromString("conv");
  Py_RETURN_NONE;
}

PyMethodDef functions[] = {{"set_up", set_up, METH_VARARGS, "Hand over what is looked up in Python."},
                           {nullptr, nullptr, 0, nullptr}};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "_cached_calls", nullptr, -1, functions, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__cached_calls() {
  CacheType.tp_name = "convselect._cached_calls.Cache";
  CacheType.tp_basicsize = sizeof(Cache);
  CacheType.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL;
  CacheType.tp_vectorcall_offset = offsetof(Cache, vectorcall);
  CacheType.tp_call = PyVectorcall_Call;
  CacheType.tp_init = (initproc)initialise;
  CacheType.tp_new = PyType_GenericNew;
  CacheType.tp_dealloc = (destructor)free_cache;
  CacheType.tp_methods = cache_methods;
  if (PyType_Ready(&CacheType) < 0) return nullptr;
  PyObject* made = PyModule_Create(&module);
  if (made == nullptr) return nullptr;
  Py_INCREF(&CacheType);
  PyModule_AddObject(made, "Cache", (PyObject*)&CacheType);
  return made;
}
