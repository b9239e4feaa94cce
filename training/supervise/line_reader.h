// Lines from a pipe, as they come.
#pragma once
#include <string>
#include <vector>

namespace train_gpt {

class LineReader {
  public:
    LineReader() = default;
    /// Takes the descriptor and makes reading from it wait for nothing.
    explicit LineReader(int descriptor);
    ~LineReader();
    LineReader(LineReader&& other) noexcept;
    LineReader& operator=(LineReader&& other) noexcept;

    int descriptor() const { return descriptor_; }
    bool is_at_end() const { return descriptor_ < 0; }

    /// The lines that have come since the last call, without their ends. The end of the input also
    /// ends its last line. A line of more than a megabyte is cut into several.
    std::vector<std::string> take();
    /// Ends the input here; the next take() returns what is left.
    void finish();
    /// Waits for the next line. Empty if the input has ended.
    std::string wait_for_line();

  private:
    void read_more();
    void close();

    int descriptor_ = -1;
    std::string text_;
};

}  // namespace train_gpt
