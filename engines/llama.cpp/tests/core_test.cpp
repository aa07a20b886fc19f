/* The backend without llama.cpp and ggml, on a stand-in for both.
 *
 * usage: core_test [CASE ...] */
#include "profile_write.h"
#include "row_tag.h"
#include "stand_in.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <string>

int n_bad = 0;

namespace
{

/* ---- Cases ---- */

void test_tag()
{
    uint16_t row[128];
    for (int i = 0; i < 128; i++) row[i] = (uint16_t)(i * 511);
    CHECK(read_tag(row, 128).order == 0 && read_tag(row, 128).exact);
    for (int exact = 0; exact < 2; exact++) {
        row_tag tag;
        tag.order = 123456789u;
        tag.exact = exact != 0;
        write_tag(row, 128, tag);
        CHECK(read_tag(row, 128).order == tag.order && read_tag(row, 128).exact == tag.exact);
        row[100] ^= 4;
        CHECK(read_tag(row, 128).order == 0);
    }
    CHECK(read_tag(row, 32).order == 0);
}

void test_runs()
{
    enum { N = 128 };
    std::vector<uint32_t> order(N);
    std::vector<uint16_t> mask(4 * N, HIDDEN);
    for (uint32_t i = 0; i < N; i++) order[i] = i + 1;
    const int32_t own[4] = {10, 11, 70, 12};
    for (int q = 0; q < 4; q++) {
        if (q == 2) {
            for (int c = 64; c <= 70; c++) mask[(size_t)(q * N + c)] = SEEN;
            continue;
        }
        for (int c = 0; c <= own[q]; c++) mask[(size_t)(q * N + c)] = 0x8000; /* minus zero */
    }
    const mask_view m = {mask.data(), N * 2, 0, N, 4, 1, 0, N};
    std::vector<run> runs;
    CHECK(make_runs(m, own, order.data(), &runs) && runs.size() == 3);
    CHECK(runs[0].n_queries == 2 && runs[0].cells.size() == 12 && runs[0].pages.size() == 1);
    CHECK(runs[1].first == 2 && runs[1].cells.size() == 7 && runs[1].pages[0] == 1);
    CHECK(make_runs(m, nullptr, order.data(), &runs) && runs.size() == 4);
    std::swap(order[3], order[9]); /* a later position lies in an earlier cell */
    CHECK(make_runs(m, own, order.data(), &runs) && runs[0].cells[3] == 9 && runs[0].cells[9] == 3 &&
          runs[0].pages.empty());
    mask[5] = 0x3c00;
    CHECK(!make_runs(m, own, order.data(), &runs));
}

void test_window()
{
    enum { N = 64, W = 8, QUERIES = 20 };
    std::vector<uint32_t> order(N);
    std::vector<uint16_t> mask(QUERIES * N, HIDDEN);
    int32_t own[QUERIES];
    for (uint32_t i = 0; i < N; i++) order[i] = i + 1;
    for (int q = 0; q < QUERIES; q++) {
        own[q] = q;
        for (int c = std::max(0, q - W + 1); c <= q; c++) mask[(size_t)(q * N + c)] = SEEN;
    }
    const mask_view m = {mask.data(), N * 2, 0, N, QUERIES, 1, 0, N};
    std::vector<run> runs;
    CHECK(make_runs(m, own, order.data(), &runs) && runs.size() == 1);
    CHECK(runs[0].window == W && runs[0].cells.size() == QUERIES);
}

void test_ends()
{
    ends_map ends;
    std::vector<int32_t> cells(200), more;
    for (int32_t i = 0; i < 200; i++) cells[(size_t)i] = i;
    for (int32_t i = 500; i < 560; i++) more.push_back(i);
    ends.open(1000, 192);
    ends.take(cells.data(), 128, 1);
    CHECK(ends.capacity() == 128 && ends.slot_of(127) == ends.page_of(1) * PAGE + 63 && ends.slot_of(128) < 0);
    for (int i = 0; i < 64; i++) ends.pass(i, 2);
    for (int i = 64; i < 128; i++) ends.keep(i, 2);
    ends.take(more.data(), more.size(), 3); /* two pages: that of cell 0, and a new one */
    CHECK(ends.capacity() == 192 && ends.slot_of(0) < 0);
    for (int i = 64; i < 128; i++) CHECK(ends.slot_of(i) >= 0);
    for (int i : more) CHECK(ends.slot_of(i) == ends.page_of(i / PAGE) * PAGE + i % PAGE);
    CHECK(ends.n_needed() == 192);
    for (int i = 500; i < 520; i++) ends.pass(i, 4);
    const auto moved = ends.shrink();
    CHECK(moved.size() == 104 && ends.capacity() == 128 && ends.page_of(7) < 0 && ends.slot_of(519) < 0);
    for (int i = 520; i < 560; i++) CHECK(ends.slot_of(i) >= 0);
    ends.take(cells.data() + 128, 72, 5); /* cells 128 to 199: one new page, and the one that is idle for longest */
    CHECK(ends.capacity() == 192 && ends.slot_of(128) >= 0 && ends.slot_of(199) >= 0 && ends.slot_of(64) < 0 &&
          ends.slot_of(559) >= 0);
    ends.release_all();
    ends.take(cells.data(), 200, 6); /* four pages in room for three: the newest cells get them */
    CHECK(ends.slot_of(0) < 0 && ends.slot_of(64) >= 0 && ends.slot_of(199) >= 0);

    ends_map small; /* a page that was passed is not taken from a batch that has a cell in it */
    small.open(1000, 128);
    small.take(cells.data(), 63, 1);
    for (int i = 0; i < 63; i++) small.pass(i, 2);
    small.take(cells.data() + 63, 100, 3);
    CHECK(small.slot_of(63) >= 0 && small.slot_of(64) < 0 && small.slot_of(162) >= 0);
}

/* Without calibration, so that positions beyond the ends are codes. */
void test_exact_ends()
{
    engine e("i8/tq4", false);
    e.speak(1, 0, 132, 0);
    CHECK(e.take_worst() < 2e-3);
    e.speak(1, 132, 300, 0);
    e.speak(1, 432, 7, 0);
    const double alone = e.take_worst();
    CHECK(alone > 2e-3 && alone < 0.25);
    engine turns("i8/tq4", false); /* cells of two sequences lie between each other: in no whole pages */
    for (int i = 0; i < 132; i++) turns.run({{1, i, 0}, {2, i, 1}});
    CHECK(turns.take_worst() < 2e-3);
    turns.run({{1, 132, 0}, {2, 132, 1}});
    turns.speak(1, 133, 70, 0);
    CHECK(turns.take_worst() > 2e-3);
}

void test_pieces(const char *preset, double bound)
{
    for (int piece : {1, 7, 64, 200}) {
        engine e(preset);
        for (int i = 0; i < 400; i += piece) e.speak(1, i, std::min(piece, 400 - i), 0);
        CHECK(e.take_worst() < bound);
    }
}
void test_pieces_f16() { test_pieces("f16/f16", 2e-3); }
void test_pieces_small() { test_pieces("small", 0.5); }

void test_sequences()
{
    engine e("f16/f16");
    for (int round = 0; round < 20; round++) {
        std::vector<token> tokens;
        for (int s = 0; s < 3; s++)
            for (int i = 0; i < 1 + s; i++) tokens.push_back({s, round * (1 + s) + i, s});
        e.run(tokens);
    }
    for (int32_t c : e.cells_of(1)) e.cells[(size_t)c].sequences.push_back(3);
    for (int i = 0; i < 20; i++) e.run({{1, 40 + i, 1}, {9, 40 + i, 3}});
    e.remove(1, 30);
    e.speak(7, 30, 50, 1);
    CHECK(e.take_worst() < 2e-3);
}

/* What was written in another text's place: neither codes nor halves of it are met. */
void test_state()
{
    engine e("tq5/tq4", false), fresh("tq5/tq4", false);
    for (int i = 0; i < 600; i += 20) e.speak(1, i, 20, 0);
    std::vector<uint16_t> states[2];
    for (int s = 0; s < 2; s++) {
        states[s].resize(600 * ROW);
        CHECK(e.rows.save(*e.l, (side)s, 0, 600, states[s].data()) == TQKV_OK);
    }
    const auto saved = e.cells;
    e.remove(0, 0);
    e.speak(2, 0, 650, 0);
    e.take_worst();
    for (engine *to : {&e, &fresh}) {
        to->cells = saved;
        for (int s = 0; s < 2; s++) CHECK(to->rows.load(to->l, (side)s, 0, 600, states[s].data()) == TQKV_OK);
        for (int32_t c = 0; c < 600; c++) {
            if (c >= PAGE && c < 300) CHECK(!to->l->streams[KEYS].has_half(c, to->rows.ends()));
            if (c >= 4 && c < 600 - 128) continue;
            CHECK(to->l->streams[KEYS].has_half(c, to->rows.ends()));
            CHECK(to->l->streams[VALUES].has_half(c, to->rows.ends()));
        }
        to->speak(1, 600, 20, 0);
    }
    CHECK(e.worst == fresh.worst && e.worst < 0.25);
    std::vector<uint16_t> again(300 * ROW);
    CHECK(fresh.rows.save(*fresh.l, KEYS, 0, 300, again.data()) == TQKV_OK);
    /* The same codes: norms differ by the rounding to halves. */
    for (size_t i = PAGE * ROW; i < 300 * ROW; i++) CHECK(abs((int)again[i] - (int)states[0][i]) <= 4);
}

void test_copy()
{
    engine e("i8/tq4", false);
    e.speak(1, 0, 300, 0);
    CHECK(e.rows.copy(e.l, KEYS, 0, 512, 300) == TQKV_OK && e.rows.copy(e.l, VALUES, 0, 512, 300) == TQKV_OK);
    for (int c : {0, 3, 4, 171, 172, 299})
        CHECK(e.l->streams[KEYS].has_half(512 + c, e.rows.ends()) == (c < 4 || c >= 172));
}

/* Learned in the run: a bias of the keys costs nothing, and one token again and again teaches nothing. */
void test_learning()
{
    engine e("tq3/i8", false, 4096, 12.0f), small("tq3/i8", true, 4096, 12.0f);
    e.speak(1, 0, 1000, 0);
    e.speak(1, 1000, 40, 0);
    const double without = e.take_worst();

    for (int i = 0; i < 520; i++) small.run({{3, 7, 0}});
    CHECK(small.rows.is_learning());
    small.remove(0, 0);
    small.speak(1, 0, 1000, 0);
    CHECK(small.rows.is_learning() && small.take_worst() < 2e-3);
    small.speak(1, 1000, 40, 0);
    CHECK(!small.rows.is_learning());
    CHECK(small.take_worst() < 0.5 * without);
    const int halves = small.l->streams[KEYS].halves().capacity;
    small.speak(1, 1040, 1, 0);
    CHECK(small.l->streams[KEYS].halves().capacity < halves && small.take_worst() < 0.5 * without);
}

/* A file with the plan f16/f16 for layer 0; "" where it cannot be written. */
std::string plan_file(int n_heads)
{
    std::vector<float> center((size_t)n_heads * DIM, 0.0f), scale((size_t)n_heads * DIM, 1.0f);
    profile_layer l = {n_heads, DIM, center.data(), scale.data(), TQKV_F16, TQKV_F16};
    const profile p = {1, &l};
    char path[] = "/tmp/tqkv-plan-XXXXXX";
    const int file = mkstemp(path);
    if (file >= 0) close(file);
    return file >= 0 && profile_save(path, &p) == TQKV_OK ? path : "";
}

/* The worst error with a profile, and the format of the keys. */
double error_with(const std::string &path, const char *preset, tqkv_format *format)
{
    setenv("TQKV_PROFILE", path.c_str(), 1);
    engine e(preset, false);
    e.speak(1, 0, 400, 0);
    *format = e.l->streams[KEYS].codes().format;
    unsetenv("TQKV_PROFILE");
    return e.take_worst();
}

/* Formats of a plan come before a preset's, not before those named by hand; a plan of another model is not used. */
void test_plan()
{
    tqkv_format format;
    const std::string own = plan_file(HEADS), other = plan_file(HEADS + 1);
    CHECK(!own.empty() && !other.empty());
    CHECK(error_with(own, "tiny", &format) < 2e-3 && format == TQKV_F16);
    CHECK(error_with(own, "tq3/tq2", &format) > 2e-3 && format == TQKV_TQ3);
    CHECK(error_with(other, "tiny", &format) > 2e-3 && format == TQKV_TQ3);
    CHECK(error_with("/no/such/file", "tiny", &format) > 2e-3 && format == TQKV_TQ3);
    remove(own.c_str());
    remove(other.c_str());
}

/* Codes lie in pages of their own, of which those without positions take no memory. */
void test_memory()
{
#ifdef __APPLE__
    typedef char resident;
#else
    typedef unsigned char resident;
#endif
    std::vector<char>(64u << 20, 1).clear(); /* the heap has memory that is not zero */
    engine e("small", false, 65536);
    e.speak(1, 0, 300, 0);
    const tqkv_store &codes = e.l->streams[KEYS].codes();
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    std::vector<resident> pages(codes.codes_size / page + 1);
    CHECK(mincore(codes.codes, codes.codes_size, pages.data()) == 0);
    CHECK(std::count_if(pages.begin(), pages.end(), [](resident r) { return r & 1; }) < (ptrdiff_t)pages.size() / 8);
}

void test_clear()
{
    engine e("small");
    e.speak(1, 0, 400, 0);
    e.rows.clear();
    CHECK(!e.rows.is_learning());
    e.cells.assign(e.cells.size(), engine::cell());
    e.speak(2, 0, 300, 0);
    CHECK(e.take_worst() < 0.5);
}

const struct {
    const char *name;
    void (*run)();
} CASES[] = {
    {"tag", test_tag},
    {"runs", test_runs},
    {"window", test_window},
    {"ends", test_ends},
    {"exact_ends", test_exact_ends},
    {"pieces/f16", test_pieces_f16},
    {"pieces/small", test_pieces_small},
    {"sequences", test_sequences},
    {"state", test_state},
    {"copy", test_copy},
    {"learning", test_learning},
    {"plan", test_plan},
    {"memory", test_memory},
    {"clear", test_clear},
};

} // namespace

int main(int argc, char **argv)
{
    int passed = 0, failed = 0;
    for (const auto &c : CASES) {
        bool wanted = argc == 1;
        for (int i = 1; i < argc; i++) wanted |= strstr(c.name, argv[i]) != nullptr;
        if (!wanted) continue;
        n_bad = 0;
        c.run();
        (n_bad ? failed : passed)++;
        if (n_bad) printf("FAIL %s\n", c.name);
    }
    printf("%d passed, %d failed\n", passed, failed);
    return failed != 0;
}
