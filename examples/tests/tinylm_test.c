/* Unit tests of tinylm: batches against single bytes, formats against floats, truncation, and the scores. Each check
 * prints `pass NAME` or `FAIL NAME`; test.sh counts the lines. Run from the top folder. */
#define main tinylm_main
#include "../tinylm.c"
#undef main

static void report(bool good, const char *name, const char *detail)
{
    printf("%s %s%s%s\n", good ? "pass" : "FAIL", name, *detail ? ": " : "", detail);
    fflush(stdout);
}

static void report_limit(double value, double low, double high, const char *name)
{
    char detail[80];
    snprintf(detail, sizeof detail, "%.6f, wanted %.6f to %.6f", value, low, high);
    report(value >= low && value <= high, name, detail);
}

static double largest_difference(const float *a, const float *b, int count)
{
    double most = 0;
    for (int i = 0; i < count; i++) most = fabs((double)a[i] - b[i]) > most ? fabs((double)a[i] - b[i]) : most;
    return most;
}

/* One call for all n bytes against one call a byte. Of LONG bytes, both rings wrap: windows of 256 and 512, and BATCH.
 * */
enum { SHORT = 100, LONG = 700 };
static void test_batches(model *m, const unsigned char *text, int n, const char *keys, const char *values)
{
    char name[64];
    session batched, single;
    float *all = floats(LONG * VOCABULARY), *each = floats(LONG * VOCABULARY);
    session_create(&batched, m, find_format(keys), find_format(values), MAX_CONTEXT);
    session_create(&single, m, find_format(keys), find_format(values), MAX_CONTEXT);
    forward(&batched, text, n, all);
    for (int i = 0; i < n; i++) forward(&single, text + i, 1, each + i * VOCABULARY);
    snprintf(name, sizeof name, "batch/%s/%s", keys, values);
    report_limit(largest_difference(all, each, n * VOCABULARY), 0, 1e-4, name);
    free(all);
    free(each);
    session_destroy(&batched);
    session_destroy(&single);
}

/* A conversation that is truncated after wrong bytes continues like one without them. */
static void test_truncate(model *m, const unsigned char *text)
{
    enum { PREFIX = 600, WRONG = 100, AFTER = 50 };
    session straight, turned;
    float *a = floats(PREFIX * VOCABULARY), *b = floats(PREFIX * VOCABULARY);
    session_create(&straight, m, find_format("i8"), find_format("tq4"), MAX_CONTEXT);
    session_create(&turned, m, find_format("i8"), find_format("tq4"), MAX_CONTEXT);
    forward(&straight, text, PREFIX, a);
    forward(&turned, text, PREFIX, b);
    forward(&turned, text + 5000, WRONG, b);
    session_truncate(&turned, PREFIX);
    forward(&straight, text + PREFIX, AFTER, a);
    forward(&turned, text + PREFIX, AFTER, b);
    report(memcmp(a, b, AFTER * VOCABULARY * sizeof *a) == 0, "truncate", "");
    free(a);
    free(b);
    session_destroy(&straight);
    session_destroy(&turned);
}

static void test_same_text(model *m)
{
    static conversation floating, quantised;
    options o = {
        .prompt = "In the beginning", .n_bytes = 200, .keys = find_format("f32"), .values = find_format("f32")};
    generate_greedily(m, &o, &floating);
    o.keys = o.values = find_format("i8");
    generate_greedily(m, &o, &quantised);
    report(memcmp(floating.text, quantised.text, (size_t)floating.length) == 0, "generate/f32-i8", "200 bytes");
}

/* Speculation gives the text that the verifying cache generates alone. */
static void test_speculation(model *m, const char *keys, const char *values)
{
    static conversation plain, guessed;
    session draft;
    char name[64];
    int rounds = 0;
    options o = {.prompt = "And it came to pass, that", .n_bytes = 200};
    o.keys = find_format(keys);
    o.values = find_format(values);
    generate_greedily(m, &o, &plain);
    conversation_start(&guessed, m, &o);
    session_create(&draft, m, find_format("tq4"), find_format("tq4"), MAX_CONTEXT);
    prefill(&draft, guessed.text, guessed.length - 1);
    for (; guessed.length < plain.length; rounds++) speculate_round(&guessed, &draft);
    snprintf(name, sizeof name, "speculate/%s/%s", keys, values);
    report(memcmp(plain.text, guessed.text, (size_t)plain.length) == 0 && rounds < o.n_bytes, name, "");
    session_destroy(&draft);
    session_destroy(&guessed.s);
}

/* Trees of guesses, behind a prompt that fills both rings: a path of the tree gives the logits that a run of its bytes
 * gives, and the kept path continues like one. */
static void test_tree(model *m, const unsigned char *text, const char *keys, const char *values, double limit)
{
    enum { PROMPT = 700 };
    static float logits[TREE_NODES * VOCABULARY], run[(TREE_DEPTH + 2) * VOCABULARY];
    unsigned char path[TREE_DEPTH + 1], written[TREE_DEPTH + 1];
    char name[64];
    double worst = 0;
    guess_tree t;
    session branched, straight;
    session_create(&branched, m, find_format(keys), find_format(values), MAX_CONTEXT);
    session_create(&straight, m, find_format(keys), find_format(values), MAX_CONTEXT);
    prefill(&branched, text, PROMPT);
    prefill(&straight, text, PROMPT);
    tree_start(&t, text[PROMPT]);
    tree_guess(&branched, &t);
    tree_forward(&branched, &t, logits);
    session_truncate(&branched, PROMPT);
    for (int leaf = t.levels[TREE_DEPTH]; leaf < t.n; leaf++) {
        for (int node = leaf, i = TREE_DEPTH; i >= 0; node = t.parents[node], i--) path[i] = t.bytes[node];
        forward(&straight, path, TREE_DEPTH + 1, run);
        session_truncate(&straight, PROMPT);
        for (int node = leaf, i = TREE_DEPTH; i >= 0; node = t.parents[node], i--)
            worst = fmax(worst, largest_difference(logits + node * VOCABULARY, run + i * VOCABULARY, VOCABULARY));
    }
    snprintf(name, sizeof name, "tree/paths/%s/%s", keys, values);
    report_limit(worst, 0, limit, name);
    int right = tree_verify(&branched, &t, written);
    forward(&straight, text + PROMPT, 1, run);
    forward(&straight, written, right + 1, run + VOCABULARY);
    forward(&branched, written + right, 1, logits);
    snprintf(name, sizeof name, "tree/kept/%s/%s", keys, values);
    report_limit(largest_difference(logits, run + (right + 1) * VOCABULARY, VOCABULARY), 0, limit, name);
    session_destroy(&branched);
    session_destroy(&straight);
}

/* Bits a byte of the reference, which comes first, or the KL divergence of a format, over all windows. */
static void test_score(scoring *job, const char *format, double low, double high)
{
    double means[3];
    char name[64];
    bool reference = strcmp(format, "f32") == 0;
    score_windows(job, find_format(format), find_format(format), reference ? job->reference : job->logits, NULL);
    compare(reference ? job->reference : job->logits, job->reference, job->text, job->n_windows * WINDOW_BYTES, means);
    snprintf(name, sizeof name, "score/%s/%s", format, reference ? "bits" : "divergence");
    report_limit(means[reference ? 0 : 1], low, high, name);
}

/* The limits come from an independent implementation of model and formats, on the same windows. */
static void test_scores(model *m, unsigned char *text)
{
    enum { WINDOWS = 16 };
    size_t count = (size_t)WINDOWS * WINDOW_BYTES * VOCABULARY;
    scoring job = {m, text, WINDOWS, floats(count), floats(count), 0};
    test_score(&job, "f32", 1.3523 - 0.0005, 1.3523 + 0.0005);
    test_score(&job, "tq4", 0.0039 * 0.85, 0.0039 * 1.15);
    job.n_windows = 4; /* enough for formats whose divergence only has a bound */
    test_score(&job, "i8", 0, 0.00003);
    test_score(&job, "tq8", 0, 0.00005);
    /* Most of this model's attention falls on the newest 128 positions, which presets keep exactly. */
    test_score(&job, "safe", 1e-7, 0.00003);
    test_score(&job, "small", 1e-6, 0.0002);
    test_score(&job, "tiny", 1e-5, 0.001);
    m->exact_last = 64; /* as exact in a chunk of a prompt as alone */
    for (m->batch = 8; m->batch <= 128; m->batch *= 16) test_score(&job, "tq4", 0, 0.0002);
    m->exact_last = m->batch = 0;
    free(job.reference);
    free(job.logits);
}

/* Logarithms of probabilities on a text behind `warm_up` equal bytes, which are taken back before the text if it is to
 * forget them. Freed by the caller. */
enum { WARM_UP = 520, BEHIND = 1200 };
static float *logits_behind(model *m, const unsigned char *text, const char *keys, const char *values, int warm_up,
                            bool forgets)
{
    static unsigned char before[WARM_UP];
    static float skipped[WARM_UP * VOCABULARY];
    float *logits = floats(BEHIND * VOCABULARY);
    session s;
    session_create(&s, m, find_format(keys), find_format(values), MAX_CONTEXT);
    memset(before, ' ', sizeof before);
    if (warm_up) forward(&s, before, warm_up, skipped);
    if (forgets) session_truncate(&s, 0);
    forward(&s, text, BEHIND, logits);
    for (int t = 0; t < BEHIND; t++) log_softmax(logits + t * VOCABULARY);
    session_destroy(&s);
    return logits;
}

/* Nats a byte that a cache loses against floats. */
static double loss_behind(model *m, const unsigned char *text, const char *keys, const char *values, int warm_up,
                          bool forgets)
{
    static float *known[2]; /* of floats: without what they forget, and behind it */
    const bool behind = warm_up && !forgets;
    double means[3];
    if (!known[behind]) known[behind] = logits_behind(m, text, "f32", "f32", behind ? warm_up : 0, false);
    float *logits = logits_behind(m, text, keys, values, warm_up, forgets);
    compare(logits, known[behind], text, BEHIND, means);
    free(logits);
    return means[1];
}

/* What a preset has seen of one byte, again and again, does no harm: taken back it leaves nothing, and in front of the
 * text the preset loses no more than its formats without one. */
static void test_warm_up(model *m, const unsigned char *text, const char *preset, const char *keys, const char *values)
{
    char name[64];
    const double fresh = loss_behind(m, text, preset, preset, 0, false);
    snprintf(name, sizeof name, "warm_up/%s/taken back", preset);
    report_limit(loss_behind(m, text, preset, preset, WARM_UP, true), 0, 2 * fresh, name);
    snprintf(name, sizeof name, "warm_up/%s/in front", preset);
    report_limit(loss_behind(m, text, preset, preset, WARM_UP, false), 0,
                 loss_behind(m, text, keys, values, WARM_UP, false), name);
}

/* A bias in all keys drowns what four bits keep of them, and a centre takes it away. */
static void test_bias(model *m, unsigned char *text)
{
    size_t count = (size_t)WINDOW_BYTES * VOCABULARY;
    scoring job = {m, text, 1, floats(count), floats(count), 0};
    plant_bias(m, text, 20, 0);
    test_score(&job, "f32", 1, 2);
    test_score(&job, "tq4", 0.5, 10);
    find_centers(m, text, 128);
    test_score(&job, "tq4", 0.002, 0.012);
    free(job.reference);
    free(job.logits);
}

int main(void)
{
    model m;
    data_file text;
    options o = parse(2, (char *[]){"test", "score", NULL});
    if (!data_file_open(&text, o.file) || !model_load(&m, o.model_path, o.n_threads)) stop("data", "missing");
    for (int i = 0; i < N_FORMATS; i++) test_batches(&m, text.bytes, SHORT, formats[i].name, formats[i].name);
    test_batches(&m, text.bytes, LONG, "q8_0r", "q4_0r");
    test_batches(&m, text.bytes, LONG, "i8", "tq4");
    test_batches(&m, text.bytes, LONG, "small", "small"); /* layers learn from 96, 160 and 512 positions, or 1,024 */
    test_truncate(&m, text.bytes);
    test_same_text(&m);
    test_speculation(&m, "i8", "i8");
    test_speculation(&m, "f16", "tq5");
    test_speculation(&m, "safe", "safe");
    test_tree(&m, text.bytes, "i8", "i8", 0.01);
    test_tree(&m, text.bytes, "safe", "safe", 0.02); /* a guess reads other positions as halves than the text */
    test_scores(&m, text.bytes);
    test_warm_up(&m, text.bytes, "safe", "i8", "tq4");
    test_warm_up(&m, text.bytes, "small", "tq5", "tq3");
    test_warm_up(&m, text.bytes, "tiny", "tq3", "tq2");
    test_bias(&m, text.bytes); /* last: the bias stays */
    free(text.bytes);
    model_free(&m);
    return 0;
}
