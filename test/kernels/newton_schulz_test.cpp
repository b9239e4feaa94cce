#include "kernels/muon/newton_schulz.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "test/kernels/kernel_test.h"
#include "test/kernels/reference.h"

namespace train_gpt {

namespace {

constexpr NewtonSchulzList lists[] = {
    NewtonSchulzList::quintic,         NewtonSchulzList::tuned, NewtonSchulzList::polar_express,
    NewtonSchulzList::polar_express_8, NewtonSchulzList::cans,  NewtonSchulzList::cubic,
    NewtonSchulzList::deepseek};

NewtonSchulzList random_list() { return lists[random_int(0, std::ssize(lists) - 1)]; }

MatrixShape random_shape() {
    const int64_t most = device_is_simulated() ? 90 : 200;
    const auto side = [&] {
        return random_int(0, 3) == 0 ? random_int(1, 9) : random_int(1, most);
    };
    return {side(), side()};
}

Values transposed(const Values& x, int64_t rows, int64_t cols) {
    Values y(x.size());
    for (int64_t i = 0; i < rows; ++i)
        for (int64_t j = 0; j < cols; ++j)
            y[static_cast<size_t>(j * rows + i)] = x[static_cast<size_t>(i * cols + j)];
    return y;
}

/// The iteration as its formula says, on the matrix as it is: with A = X·Xᵀ whatever the shape.
/// round(x): x as it is kept between the products; Sum: what products are added up in.
template <class Sum, class Round>
Values iteration(Values x, const MatrixShape& shape, NewtonSchulzList list, const Round& round) {
    const NewtonSchulzCoefficients& k = coefficients_of(list);
    const int64_t m = shape.rows, n = shape.cols;
    double squares = 0;
    for (const double v : x) squares += v * v;
    const double scale = 1 / (double{k.safety} * std::sqrt(squares) + double{k.epsilon});
    for (double& v : x) v *= scale;
    x = round(x);
    for (const NewtonSchulzStep& step : k.steps) {
        const Values A = round(product_reference<Sum>(GemmOp::nt, x, x, m, m, n)),
                     P = round(product_reference<Sum>(GemmOp::nn, A, A, m, m, m));
        Values square(A.size());
        for (size_t i = 0; i < A.size(); ++i)
            square[i] = double{step.b} * A[i] + double{step.c} * P[i];
        for (int64_t i = 0; i < m; ++i) square[static_cast<size_t>(i * (m + 1))] += double{step.a};
        x = round(product_reference<Sum>(GemmOp::nn, round(square), x, m, n, m));
    }
    return x;
}

/// Of an element in fp32. Roundings, of up to 100 units for the largest sums here, are like small
/// singular values beside the others, which each step raises by up to its a.
double rounding_bound(NewtonSchulzList list) {
    double raised = 1;
    for (const NewtonSchulzStep& step : coefficients_of(list).steps) raised *= double{step.a};
    return 100 * 0x1p-24 * raised;
}

double largest_error(const Values& ours, const Values& right) {
    double largest = 0;
    for (size_t i = 0; i < ours.size(); ++i) {
        if (!std::isfinite(ours[i])) return std::numeric_limits<double>::infinity();
        largest = std::max(largest, std::abs(ours[i] - right[i]));
    }
    return largest;
}

struct Group {
    MatrixShape shape;
    int64_t count;
    Buffer x;
    std::vector<Values> before;

    Group(const MatrixShape& of, int64_t n, DType dtype, float stddev)
        : shape(of),
          count(n),
          x(dtype, {n, of.rows, of.cols},
            random_normal(static_cast<size_t>(n * of.rows * of.cols), stddev)) {
        for (int64_t i = 0; i < n; ++i) before.push_back(matrix(i));
    }
    Values matrix(int64_t i) const {
        const Values all = x.values();
        const int64_t numel = shape.rows * shape.cols;
        return {all.begin() + i * numel, all.begin() + (i + 1) * numel};
    }
    void set(int64_t i, const Values& values) {
        for (size_t k = 0; k < values.size(); ++k)
            x.set(static_cast<size_t>(i) * values.size() + k, static_cast<float>(values[k]));
    }
    MatrixGroup group() const { return {shape, count, x.tensor().data}; }
};

void run(const std::vector<MatrixGroup>& groups, DType dtype, NewtonSchulzList list) {
    std::vector<MatrixShape> shapes;
    for (const MatrixGroup& group : groups) shapes.push_back(group.shape);
    const Stream planning(test_device(), true);
    const TestMemory workspace(newton_schulz_workspace_bytes(test_device(), dtype, shapes));
    TestStream stream(newton_schulz_scratch_bytes(planning, dtype, shapes));
    newton_schulz(
        stream,
        {.groups = groups, .dtype = dtype, .coefficients = list, .workspace = workspace.data()});
    static_cast<Stream&>(stream).synchronize();
}

}  // namespace

TEST_CASE("the Newton-Schulz iteration is as accurate as a plain one, for all shapes and lists",
          "[cuda]") {
    ON_EACH_DEVICE();
    Accuracy accuracy;
    for (int repeat = 0; repeat < (device_is_simulated() ? 4 : 8); ++repeat) {
        const DType dtype = repeat % 2 == 0 ? DType::bf16 : DType::fp32;
        const NewtonSchulzList list = random_list();
        const MatrixShape shape = random_shape();
        const Group group(shape, random_int(1, 3), dtype, 0.01f);
        CAPTURE(shape.rows, shape.cols, group.count, name_of(dtype), static_cast<int>(list));
        run({group.group()}, dtype, list);
        for (int64_t i = 0; i < group.count; ++i) {
            // On the side where A is small, as the contract says.
            const bool tall = shape.rows > shape.cols;
            const MatrixShape wide = tall ? MatrixShape{shape.cols, shape.rows} : shape;
            const auto widened = [&](const Values& x) {
                return tall ? transposed(x, shape.rows, shape.cols) : x;
            };
            const Values x = widened(group.before[static_cast<size_t>(i)]);
            const Values plain = iteration<float>(
                             x, wide, list, [&](const Values&v) { return stored_as(dtype, v); }),
                         right = iteration<double>(x, wide, list, [](const Values&v) { return v; });
            const Values ours = widened(group.matrix(i));
            if (dtype == DType::bf16) {
                accuracy.check("newton_schulz", dtype, ours, plain, right);
                continue;
            }
            // Where singular values are small, roundings grow as they do.
            CHECK(largest_error(ours, right) < rounding_bound(list));
        }
    }
}

namespace {

/// Matrices s·u·vᵀ + t·w·zᵀ with u ⊥ w and v ⊥ z, of length 1: the iteration makes
/// p(s)·u·vᵀ + p(t)·w·zᵀ of them, where p is applied to numbers.
class TwoValues {
  public:
    explicit TwoValues(const MatrixShape& shape)
        : left_(pair(shape.rows)), right_(pair(shape.cols)) {}

    Values matrix(double s, double t) const {
        const size_t rows = left_[0].size(), cols = right_[0].size();
        Values x(rows * cols);
        for (size_t i = 0; i < rows; ++i)
            for (size_t j = 0; j < cols; ++j)
                x[i * cols + j] = s * left_[0][i] * right_[0][j] + t * left_[1][i] * right_[1][j];
        return x;
    }

  private:
    static std::vector<Values> pair(int64_t n) {
        std::vector<Values> two;
        for (int k = 0; k < 2; ++k) {
            const std::vector<float> random = random_normal(static_cast<size_t>(n));
            Values v(random.begin(), random.end());
            double along = 0, length = 0;
            for (size_t i = 0; k == 1 && i < v.size(); ++i) along += v[i] * two[0][i];
            for (size_t i = 0; i < v.size(); ++i) {
                if (k == 1) v[i] -= along * two[0][i];
                length += v[i] * v[i];
            }
            for (double& x : v) x /= std::sqrt(length);
            two.push_back(v);
        }
        return two;
    }
    std::vector<Values> left_, right_;
};

/// p(x) of the singular values of a matrix with these two, as the iteration begins with them.
std::pair<double, double> iterated(NewtonSchulzList list, double s, double t) {
    const NewtonSchulzCoefficients& k = coefficients_of(list);
    const double length = double{k.safety} * std::sqrt(s * s + t * t) + double{k.epsilon};
    s /= length, t /= length;
    for (const NewtonSchulzStep& step : k.steps)
        for (double* value : {&s, &t})
            *value *= double{step.a} + double{step.b} * *value * *value +
                      double{step.c} * std::pow(*value, 4);
    return {s, t};
}

/// Checks that a matrix of this shape, beside another one, has the singular values that it must.
void check_two_values(const MatrixShape& shape, NewtonSchulzList list, int64_t count) {
    const TwoValues values(shape);
    const double ratio = static_cast<double>(random_int(20, 90)) / 100;
    Group group(shape, count, DType::fp32, 1);
    group.set(count - 1, values.matrix(3, 3 * ratio));
    run({group.group()}, DType::fp32, list);
    const auto [s, t] = iterated(list, 3, 3 * ratio);
    CAPTURE(shape.rows, shape.cols, ratio, static_cast<int>(list), s, t);
    // Where each list takes values from 0.01 on (docs/optimizers.md)
    constexpr double ends[][2] = {{0.68, 1.14}, {0.97, 1.04}, {0.85, 1.15}, {0.99, 1.01},
                                  {0.88, 1.13}, {0.77, 1.31}, {0.99, 1.01}};
    const auto [least, most] = ends[static_cast<size_t>(list)];
    CHECK((least < s && s < most && least < t && t < most));
    CHECK(largest_error(group.matrix(count - 1), values.matrix(s, t)) < rounding_bound(list));
}

}  // namespace

TEST_CASE("the iteration brings singular values near 1 and leaves singular vectors", "[cuda]") {
    ON_EACH_DEVICE();
    for (int repeat = 0; repeat < 3; ++repeat)
        check_two_values({random_int(2, 80), random_int(2, 80)}, random_list(), 1);
}

TEST_CASE("the iteration is right for a large matrix, on which all threads of a CPU work") {
    const int64_t side = 1024 + random_int(1, 30), other = 1024 + random_int(1, 30);
    check_two_values({side, other}, NewtonSchulzList::quintic, 1);
}

TEST_CASE("a group of more matrices than a GPU takes at a time is taken in parts", "[cuda]") {
    ON_EACH_DEVICE();
    check_two_values({random_int(2, 9), random_int(2, 9)}, random_list(), random_int(15, 18));
    // So large that one is taken at a time. Of one row, whose only singular value is its length.
    const MatrixShape shape{1, (int64_t{1} << 23) + random_int(1, 1000)};
    // Other lists raise what is rounded of 1 itself.
    const NewtonSchulzList list =
        random_int(0, 1) == 0 ? NewtonSchulzList::quintic : NewtonSchulzList::polar_express_8;
    const auto n = static_cast<size_t>(shape.cols);
    std::vector<float> all(2 * n);
    std::vector<size_t> places;
    double squares[2] = {};
    for (size_t row = 0; row < 2; ++row)
        for (size_t i = 1; i <= 100; ++i) {
            places.push_back(row * n + i * (n / 100) - 1);
            if (i == 100) places.back() = row * n + n - 1;
            const float value = random_normal(1)[0];
            all[places.back()] = value;
            squares[row] += double{value} * double{value};
        }
    const Buffer x(DType::fp32, {2, shape.rows, shape.cols}, all);
    run({{shape, 2, x.tensor().data}}, DType::fp32, list);
    CAPTURE(shape.cols, static_cast<int>(list));
    for (const size_t at : places) {
        const double length = std::sqrt(squares[at / n]);
        CHECK(x[at] ==
              Approx(iterated(list, length, 0).first * double{all[at]} / length).margin(1e-5));
        CHECK(x[at - 1] == 0);
    }
}

TEST_CASE("a matrix has the same bits beside any others, with any number of threads", "[cuda]") {
    ON_EACH_DEVICE();
    const DType dtype = random_int(0, 1) == 0 ? DType::bf16 : DType::fp32;
    const NewtonSchulzList list = random_list();
    const MatrixShape shape = random_shape();
    const int64_t count = random_int(2, device_is_simulated() ? 4 : 20);
    Group together(shape, count, dtype, 1), other(random_shape(), 2, dtype, 1);
    CAPTURE(shape.rows, shape.cols, count, name_of(dtype), static_cast<int>(list));
    const Values first = together.before[static_cast<size_t>(count - 1)];
    Group alone(shape, 1, dtype, 1);
    alone.set(0, first);
    run({alone.group()}, dtype, list);
    const int threads = omp_get_max_threads();
    omp_set_num_threads(3);
    run({other.group(), together.group()}, dtype, list);
    omp_set_num_threads(threads);
    CHECK(alone.matrix(0) == together.matrix(count - 1));
}

}  // namespace train_gpt
