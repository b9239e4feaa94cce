// Matrix products with oneDNN. Its APIs 2 and 3 differ only in how a primitive descriptor is made.
#ifdef TRAIN_GPT_ONEDNN
#include <cassert>
#include <functional>
#include <memory>
#include <mutex>
#include <string_view>
#include <unordered_map>

#include <omp.h>
#include <oneapi/dnnl/dnnl.hpp>

#include "base/error.h"
#include "kernels/linear/gemm.h"

namespace train_gpt {

namespace {

using dnnl::memory;

memory::data_type library_type(DType dtype) {
    return dtype == DType::bf16 ? memory::data_type::bf16 : memory::data_type::f32;
}

/// `stride`: from one row to the next as it lies in memory; 0: contiguous.
memory::desc matrix(int64_t rows, int64_t cols, DType dtype, bool transposed, int64_t stride = 0) {
    if (stride == 0) stride = transposed ? rows : cols;
    const memory::dims strides = transposed ? memory::dims{1, stride} : memory::dims{stride, 1};
    return {memory::dims{rows, cols}, library_type(dtype), strides};
}

/// A product for one shape and team size. Planning needs only the description; the code is compiled
/// at the first use.
struct Product {
    memory::desc a, b, c, bias, residual, scratchpad;
    memory::desc plain_b;  // if b has a layout of the library: the layout from which it is packed
    dnnl::matmul::primitive_desc descriptor;
    bool supported = false;
    bool copies = false;  // the kernel copies both operands into its own blocks
    dnnl::matmul primitive;
    dnnl::reorder packing;
};

dnnl::matmul::primitive_desc describe(const dnnl::engine& engine, const Product& product,
                                      const dnnl::primitive_attr& attributes, bool bias) {
#if DNNL_VERSION_MAJOR >= 3
    if (bias) {
        return {engine, product.a, product.b, product.bias, product.c, attributes};
    }
    return {engine, product.a, product.b, product.c, attributes};
#else
    if (bias) {
        return {{product.a, product.b, product.bias, product.c}, attributes, engine};
    }
    return {{product.a, product.b, product.c}, attributes, engine};
#endif
}

/// Whether the CPU has AVX-512 and DNNL_MAX_CPU_ISA allows it.
bool has_avx512() {
    const auto all = static_cast<unsigned>(dnnl::cpu_isa::avx512_core);
    return (static_cast<unsigned>(dnnl::get_effective_cpu_isa()) & all) == all;
}

/// oneDNN 2.6's kernels for AMX compute sums of 63, 2079, 2111, … products with tiles that they
/// have not configured: SIGILL, or wrong results, depending on m and n. All such depths are
/// avoided, in every version: they are rare, and nobody has listed the bad ones.
bool has_fault(const GemmShape& shape) {
    const auto amx = static_cast<unsigned>(dnnl::cpu_isa::avx512_core_amx);
    return shape.in == DType::bf16 && shape.k % 32 == 31 &&
           (static_cast<unsigned>(dnnl::get_effective_cpu_isa()) & amx) == amx;
}

Product describe_product(const dnnl::engine& engine, const GemmShape& shape) {
    Product product;
    product.a = matrix(shape.m, shape.k, shape.in, shape.op == GemmOp::tn, shape.lda);
    product.plain_b = matrix(shape.k, shape.n, shape.in, shape.op == GemmOp::nt, shape.ldb);
    product.b = shape.packed ? memory::desc(memory::dims{shape.k, shape.n}, library_type(shape.in),
                                            memory::format_tag::any)
                             : product.plain_b;
    product.c = matrix(shape.m, shape.n, shape.out, false, shape.ldc);
    product.bias = matrix(1, shape.n, shape.in, false);
    product.residual = matrix(shape.m, shape.n, shape.in, false);

    dnnl::post_ops after;
    if (shape.residual) after.append_binary(dnnl::algorithm::binary_add, product.residual);
    if (shape.accumulate) after.append_sum(1.0f);
    dnnl::primitive_attr attributes;
    attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
    attributes.set_post_ops(after);
    try {
        product.descriptor = describe(engine, product, attributes, shape.bias);
        product.b = product.descriptor.weights_desc();
        product.scratchpad = product.descriptor.scratchpad_desc();
        // Reference implementations are plain loops that exist for completeness.
        const std::string_view implementation = product.descriptor.impl_info_str();
        product.supported = !implementation.starts_with("ref") && !has_fault(shape);
        product.copies = implementation.starts_with("gemm:jit") && !has_avx512();
    } catch (const dnnl::error& error) {
        if (error.status != dnnl_unimplemented) {
            throw Error("oneDNN cannot prepare a matrix product of ", shape.m, "×", shape.k, "×",
                        shape.n, " in ", name_of(shape.in), ": ", error.what(),
                        "; set kernels.gemm to \"own\" to run without it.");
        }
    }
    return product;
}

struct Key {
    GemmShape shape;
    int threads;  // the library divides the work when the product is prepared

    bool operator==(const Key&) const = default;
};

struct KeyHash {
    size_t operator()(const Key& key) const {
        const GemmShape& s = key.shape;
        uint64_t hash = static_cast<uint64_t>(s.op) | static_cast<uint64_t>(s.in) << 2 |
                        static_cast<uint64_t>(s.out) << 4 | uint64_t{s.bias} << 6 |
                        uint64_t{s.residual} << 7 | uint64_t{s.accumulate} << 8 |
                        uint64_t{s.packed} << 9 | static_cast<uint64_t>(key.threads) << 10;
        for (int64_t extent : {s.m, s.n, s.k, s.lda, s.ldb, s.ldc}) {
            hash = (hash ^ static_cast<uint64_t>(extent)) * 0x9e3779b97f4a7c15u;
            hash ^= hash >> 29;
        }
        return static_cast<size_t>(hash);
    }
};

/// The library's engine and every product prepared so far.
class Products {
  public:
    static Products& instance() {
        static Products products;
        return products;
    }

    const dnnl::engine& engine() const { return engine_; }

    const Product& find(const GemmShape& shape) {
        const std::lock_guard lock(mutex_);
        return find_locked(shape);
    }

    /// A supported product, ready to run.
    const Product& compile(const GemmShape& shape) {
        const std::lock_guard lock(mutex_);
        Product& product = find_locked(shape);
        if (!product.primitive) product.primitive = dnnl::matmul(product.descriptor);
        return product;
    }

    /// A supported product whose B can be packed.
    const Product& compile_packing(const GemmShape& shape) {
        const std::lock_guard lock(mutex_);
        Product& product = find_locked(shape);
        if (!product.packing) {
            product.packing = dnnl::reorder(
                dnnl::reorder::primitive_desc(engine_, product.plain_b, engine_, product.b));
        }
        return product;
    }

  private:
    Product& find_locked(const GemmShape& shape) {
        const Key key{shape, omp_in_parallel() ? 1 : omp_get_max_threads()};
        std::unique_ptr<Product>& product = products_[key];
        if (!product) product = std::make_unique<Product>(describe_product(engine_, shape));
        return *product;
    }

    dnnl::engine engine_{dnnl::engine::kind::cpu, 0};
    std::mutex mutex_;
    std::unordered_map<Key, std::unique_ptr<Product>, KeyHash> products_;
};

}  // namespace

bool onednn_supports(const GemmShape& shape) { return Products::instance().find(shape).supported; }

size_t onednn_gemm_scratch_bytes(const GemmShape& shape) {
    return Products::instance().find(shape).scratchpad.get_size();
}

bool onednn_copies(const GemmShape& shape) { return Products::instance().find(shape).copies; }

size_t onednn_packed_bytes(const GemmShape& shape) {
    return (Products::instance().find(shape).b.get_size() + 63) / 64 * 64;
}

bool onednn_packs_alike(const GemmShape& one, const GemmShape& other) {
    Products& products = Products::instance();
    return products.find(one).plain_b == products.find(other).plain_b &&
           products.find(one).b == products.find(other).b;
}

void onednn_pack(const GemmShape& shape, const void* b, void* packed) {
    assert(shape.packed);
    Products& products = Products::instance();
    const Product& product = products.compile_packing(shape);
    memory from(product.plain_b, products.engine(), const_cast<void*>(b));
    memory to(product.b, products.engine(), packed);
    dnnl::stream stream(products.engine());
    product.packing.execute(stream, from, to);
    stream.wait();
}

void onednn_gemm(const GemmShape& shape, const GemmOperands& operands, void* scratch) {
    Products& products = Products::instance();
    const Product& product = products.compile(shape);
    const auto at = [&](const memory::desc& layout, const void* address) {
        return memory(layout, products.engine(), const_cast<void*>(address));
    };
    std::unordered_map<int, memory> arguments{
        {DNNL_ARG_SRC, at(product.a, operands.a)},
        {DNNL_ARG_WEIGHTS, at(product.b, operands.b)},
        {DNNL_ARG_DST, at(product.c, operands.c)},
        {DNNL_ARG_SCRATCHPAD, at(product.scratchpad, scratch)},
    };
    if (shape.bias) arguments.emplace(DNNL_ARG_BIAS, at(product.bias, operands.bias));
    if (shape.residual) {
        arguments.emplace(DNNL_ARG_ATTR_MULTIPLE_POST_OP(0) | DNNL_ARG_SRC_1,
                          at(product.residual, operands.residual));
    }
    dnnl::stream stream(products.engine());
    product.primitive.execute(stream, arguments);
    stream.wait();
}

}  // namespace train_gpt
#endif
