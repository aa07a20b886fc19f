/* A transformer on tqkv: a small byte-level language model that keeps all its keys and values in tqkv caches.
 *
 *   tinylm                                                     a short table and a paragraph
 *   tinylm score [--windows N] [--all | --keys F --values F]   the error of each pair of formats, against floats
 *     --bias LENGTHS [--before-rotary SHARE] [--center TOKENS] the same with keys that have a constant part
 *   tinylm generate PROMPT [options]                           text, byte by byte
 *   tinylm save FILE PROMPT [options]                          the caches of a prompt, in a file
 *   tinylm resume FILE [options]                               continues from there, in another process
 *   tinylm speculate PROMPT [options]                          tq4 proposes, the cache verifies, truncate undoes
 *     --tree                                                   the same with branches; compared with greedy decoding
 *   tinylm learn PROFILE [--windows N] [--text FILE]           centre and scale of the keys, for --profile PROFILE
 *     --bits N                                                 and a plan: formats by layer of so many bits a value
 *
 * Options: --preset safe|small|tiny, or --keys F, --values F; --bytes N, --temperature T, --seed N, --threads N,
 * --model FILE. Formats: f16 i8 tq8 tq6 tq5 tq4 tq3 tq2, and --first N --last N keep these positions as halves, too; or
 * the plain cache for comparison: f32, q8_0, q4_0, and q8_0r, q4_0r with llama.cpp's rotation. With --cache FOLDER
 * --limit MIB prompts are kept in files, and a later prompt that begins like one is computed from there on.
 * tinylm_session.h has the calls of tqkv in a forward pass. This file has save, resume and the removal of rejected
 * tokens. */
#define _POSIX_C_SOURCE  200809L
#define _DARWIN_C_SOURCE /* the number of processors, which POSIX does not give */
#include "tqkv.h"
#include "tinylm_profile.h"
#include "tinylm_prompt.h"
#include "tinylm_score.h"
#include "tinylm_tree.h"
#include <errno.h>

enum { PROPOSALS = 6 };

/* ---- score ---- */

/* The presets and pairs that `tinylm score` prints. With --all it prints every tqkv pair and every llama.cpp pair. */
static const char *const score_pairs[][2] = {
    {"safe", "safe"}, {"small", "small"}, {"tiny", "tiny"}, {"f16", "f16"},     {"i8", "i8"},      {"tq8", "tq8"},
    {"tq6", "tq6"},   {"tq5", "tq5"},     {"i8", "tq4"},    {"tq4", "tq4"},     {"tq4", "tq3"},    {"tq3", "tq3"},
    {"tq2", "tq2"},   {"q8_0", "q8_0"},   {"q4_0", "q4_0"}, {"q8_0r", "q8_0r"}, {"q4_0r", "q4_0r"}};

static bool pairs_up(const format_choice *keys, const format_choice *values)
{
    if (keys->is_preset || values->is_preset) return keys == values;
    return !keys->format == !values->format && keys->rotated == values->rotated && keys->bits < 32 && values->bits < 32;
}

/* With --bias, which adds to the keys: what the keys lose, beside exact values. With --center those of tqkv alone. */
static const char *const biased_pairs[][2] = {{"f16", "f16"},  {"i8", "f16"},   {"tq6", "f16"},   {"tq4", "f16"},
                                              {"q8_0", "f32"}, {"q4_0", "f32"}, {"q8_0r", "f32"}, {"q4_0r", "f32"}};

/* Prints a line of the table. The first pair of a job is the reference for the later ones. */
static void score_pair(scoring *job, const format_choice *keys, const format_choice *values)
{
    double bits, means[3], start = seconds();
    int n = job->n_windows * WINDOW_BYTES;
    float *logits = job->reference_bits > 0 ? job->logits : job->reference;
    const double bytes = score_windows(job, keys, values, logits, &bits), rate = n / (seconds() - start);
    compare(logits, job->reference, job->text, n, means);
    if (logits == job->reference) job->reference_bits = means[0];
    printf("%-6s %-6s %8.2f %9.0f %9.5f %+9.5f %11.7f %8.2f%% %9.0f\n", keys->name,
           keys->is_preset ? "preset" : values->name, bits, bytes / 1024, means[0], means[0] - job->reference_bits,
           means[1], 100 * means[2], rate);
    fflush(stdout);
}

static void score_list(scoring *job, const options *o, const char *const pairs[][2], size_t count)
{
    for (size_t i = 0; i < count; i++) {
        const format_choice *keys = find_format(pairs[i][0]);
        if (is_tqkv(keys) || o->center_tokens == 0) score_pair(job, keys, find_format(pairs[i][1]));
    }
}

static void command_score(model *m, const options *o)
{
    scoring job = scoring_open(m, o->file, o->n_windows);
    if (o->bias > 0) plant_bias(m, job.text, o->bias, o->before_rotary);
    if (o->center_tokens > 0) find_centers(m, job.text, o->center_tokens);
    printf(
        "# %d windows of %d bytes. KL: nats a byte, from the f32 cache. top-1: same likeliest byte. bits/v: codes and "
        "norms.\n",
        o->n_windows, WINDOW_BYTES);
    printf("%-6s %-6s %8s %9s %9s %9s %11s %9s %9s\n", "#keys", "values", "bits/v", "KiB", "bits/byte", "+f32", "KL",
           "top-1", "bytes/s");
    score_pair(&job, find_format("f32"), find_format("f32"));
    if (o->all) {
        for (int k = 0; k < N_FORMATS; k++)
            for (int v = 0; v < N_FORMATS; v++)
                if (pairs_up(&formats[k], &formats[v])) score_pair(&job, &formats[k], &formats[v]);
    } else if (o->keys) {
        score_pair(&job, o->keys, o->values);
    } else if (o->bias > 0) {
        score_list(&job, o, biased_pairs, sizeof biased_pairs / sizeof *biased_pairs);
    } else {
        score_list(&job, o, score_pairs, sizeof score_pairs / sizeof *score_pairs);
    }
    scoring_close(&job);
}

static void command_learn(model *m, const options *o)
{
    data_file text;
    const int n = o->n_windows * WINDOW_BYTES < MAX_CONTEXT ? o->n_windows * WINDOW_BYTES : MAX_CONTEXT;
    if (!data_file_open(&text, o->file)) stop(o->file, "cannot be read");
    if (text.size < (size_t)n) stop(o->file, "is too short for so many windows");
    if (o->bias > 0) plant_bias(m, text.bytes, o->bias, o->before_rotary);
    learn_profile(m, o, text.bytes, n);
    free(text.bytes);
}

/* ---- generate ---- */

/* A text, and the caches of all its bytes except the last. */
typedef struct conversation {
    session s;
    unsigned char text[MAX_CONTEXT];
    int length;
} conversation;

static void conversation_start(conversation *c, model *m, const options *o)
{
    size_t length = strlen(o->prompt);
    if (length == 0 || length > MAX_CONTEXT) stop("prompt", "empty, or longer than 4096 bytes");
    session_create(&c->s, m, o->keys, o->values, MAX_CONTEXT);
    memcpy(c->text, o->prompt, length);
    c->length = (int)length;
    if (!o->folder) {
        prefill(&c->s, c->text, c->length - 1);
        return;
    }
    if (!is_tqkv(o->keys)) stop("--cache", "takes tqkv's formats");
    const prompt_cache kept = session_prompts(&c->s, o);
    const int loaded = session_read_prompt(&c->s, &kept, c->text, c->length - 1);
    fprintf(stderr, "tinylm: %d of %d bytes of the prompt from %s\n", loaded, c->length - 1, o->folder);
}

/* Prints the text so far, then each new byte. */
static void conversation_continue(conversation *c, const options *o)
{
    float logits[VOCABULARY];
    uint64_t seed = o->seed;
    fwrite(c->text, 1, (size_t)c->length, stdout);
    for (int i = 0; i < o->n_bytes && c->length < MAX_CONTEXT; i++) {
        forward(&c->s, c->text + c->length - 1, 1, logits);
        c->text[c->length] = choose(logits, o->temperature, &seed);
        putchar(c->text[c->length++]);
        fflush(stdout);
    }
    putchar('\n');
}

static void command_generate(model *m, const options *o)
{
    conversation c;
    conversation_start(&c, m, o);
    conversation_continue(&c, o);
    session_destroy(&c.s);
}

/* ---- save and resume: a small header, then what tqkv_cache_save writes for each layer ---- */

static size_t write_file(void *user, const void *bytes, size_t n) { return fwrite(bytes, 1, n, (FILE *)user); }

static size_t read_file(void *user, void *bytes, size_t n) { return fread(bytes, 1, n, (FILE *)user); }

static const char prompt_magic[8] = {'T', 'Q', 'K', 'V', 'T', 'E', 'X', 'T'};

/* FNV-1a, for the text. The snapshots after it have their own checksums. */
static uint32_t text_checksum(const unsigned char *text, int length)
{
    uint32_t hash = 2166136261u;
    for (int i = 0; i < length; i++) hash = (hash ^ text[i]) * 16777619u;
    return hash;
}

static void command_save(model *m, const options *o)
{
    conversation c;
    conversation_start(&c, m, o);
    if (!is_tqkv(c.s.keys)) stop("save", "only tqkv caches can be saved");
    FILE *file = fopen(o->file, "wb");
    if (!file) stop(o->file, strerror(errno));
    uint32_t check_sum = text_checksum(c.text, c.length);
    unsigned char head[16];
    memcpy(head, prompt_magic, 8);
    for (int i = 0; i < 4; i++) {
        head[8 + i] = (unsigned char)((uint32_t)c.length >> 8 * i);
        head[12 + i] = (unsigned char)(check_sum >> 8 * i);
    }
    bool good = fwrite(head, 1, 16, file) == 16 && fwrite(c.text, 1, (size_t)c.length, file) == (size_t)c.length;
    for (int i = 0; i < m->n_layers; i++) check(tqkv_cache_save(c.s.caches[i], write_file, file), o->file);
    long size = ftell(file);
    if (fclose(file) != 0 || !good) stop(o->file, "could not be written");
    if (c.s.keys->is_preset)
        printf("%d bytes of text and their caches (preset %s) in %s: %ld bytes\n", c.length, c.s.keys->name, o->file,
               size);
    else
        printf("%d bytes of text and their caches (%s keys, %s values) in %s: %ld bytes\n", c.length, c.s.keys->name,
               c.s.values->name, o->file, size);
    session_destroy(&c.s);
}

/* Reads the header and the text. */
static void load_text(conversation *c, FILE *file, const char *path)
{
    unsigned char head[16];
    if (fread(head, 1, 16, file) != 16 || memcmp(head, prompt_magic, 8) != 0) stop(path, "is no file of `tinylm save`");
    uint32_t length = 0, check_sum = 0;
    for (int i = 3; i >= 0; i--) {
        length = length << 8 | head[8 + i];
        check_sum = check_sum << 8 | head[12 + i];
    }
    if (length == 0 || length > MAX_CONTEXT || fread(c->text, 1, length, file) != length ||
        text_checksum(c->text, (int)length) != check_sum)
        stop(path, "the text in it is damaged");
    c->length = (int)length;
}

static void command_resume(model *m, const options *o)
{
    conversation c;
    FILE *file = fopen(o->file, "rb");
    if (!file) stop(o->file, strerror(errno));
    load_text(&c, file, o->file);
    session_scratch(&c.s, m, MAX_CONTEXT);
    c.s.keys = c.s.values = &formats[0]; /* any tqkv format: the caches know their own */
    for (int i = 0; i < m->n_layers; i++) {
        /* Zero fields, here the formats, take the values of the file. The others must match it. */
        tqkv_cache_desc desc = layer_desc(&c.s, &m->layers[i]);
        check(tqkv_cache_load(&desc, read_file, file, &c.s.caches[i]), o->file);
        if (tqkv_cache_end(c.s.caches[i]) != c.length - 1) stop(o->file, "text and caches do not belong together");
    }
    if (fgetc(file) != EOF) stop(o->file, "has bytes after its end");
    fclose(file);
    c.s.end = c.length - 1;
    conversation_continue(&c, o);
    session_destroy(&c.s);
}

/* ---- speculate ---- */

/* Makes the cache of a session match the text: drops bytes that are no longer in it, appends missing ones. Gives the
 * logits after the last byte. */
static void catch_up(conversation *c, session *s, float *logits /* [PROPOSALS + 1][VOCABULARY] */)
{
    int from = s->end < c->length - 1 ? s->end : c->length - 1;
    session_truncate(s, from);
    forward(s, c->text + from, c->length - from, logits);
    memmove(logits, logits + (c->length - from - 1) * VOCABULARY, VOCABULARY * sizeof *logits);
}

/* One round: the draft proposes bytes one by one, and one call on the conversation's own cache verifies them all. The
 * proposals before the first wrong one stay; the verified byte replaces that one. Returns how many stay. */
static int speculate_round(conversation *c, session *draft)
{
    float logits[(PROPOSALS + 1) * VOCABULARY];
    int start = c->length, accepted = 0;
    for (int i = 0; i < PROPOSALS; i++) {
        catch_up(c, draft, logits);
        c->text[c->length++] = (unsigned char)largest(logits);
    }
    forward(&c->s, c->text + start - 1, PROPOSALS + 1, logits);
    while (accepted < PROPOSALS && c->text[start + accepted] == largest(logits + accepted * VOCABULARY)) accepted++;
    c->text[start + accepted] = (unsigned char)largest(logits + accepted * VOCABULARY);
    c->length = start + accepted + 1;
    session_truncate(&c->s, c->length - 1);
    return accepted;
}

/* One round with branches. Returns how many guesses stay. */
static int speculate_tree_round(conversation *c, session *draft)
{
    guess_tree t;
    tree_start(&t, c->text[c->length - 1]);
    tree_guess(draft, &t);
    int accepted = tree_verify(&c->s, &t, c->text + c->length);
    c->length += accepted + 1;
    prefill(draft, c->text + draft->end, c->length - 1 - draft->end);
    return accepted;
}

/* The bytes that the formats write without guesses. */
static void generate_greedily(model *m, const options *o, conversation *c)
{
    float logits[VOCABULARY];
    conversation_start(c, m, o);
    for (int i = 0; i < o->n_bytes && c->length < MAX_CONTEXT; i++) {
        forward(&c->s, c->text + c->length - 1, 1, logits);
        c->text[c->length++] = (unsigned char)largest(logits);
    }
    session_destroy(&c->s);
}

/* Writes with trees of guesses, says how many of each round were right, and compares with greedy decoding. */
static void command_speculate_tree(model *m, const options *o)
{
    static conversation c, greedy;
    session draft;
    int lengths[TREE_DEPTH + 1] = {0}, rounds = 0, accepted = 0;
    if (!is_tqkv(o->keys)) stop("speculate", "only tqkv caches take trees");
    generate_greedily(m, o, &greedy);
    conversation_start(&c, m, o);
    session_create(&draft, m, find_format("tq4"), find_format("tq4"), MAX_CONTEXT);
    prefill(&draft, c.text, c.length - 1);
    for (; c.length < greedy.length && c.length + TREE_NODES < MAX_CONTEXT; rounds++) {
        int right = speculate_tree_round(&c, &draft);
        lengths[right]++;
        accepted += right;
    }
    c.length = c.length < greedy.length ? c.length : greedy.length;
    fwrite(c.text, 1, (size_t)c.length, stdout);
    printf("\n%d calls of %d bytes each verified trees %d deep; guesses accepted a call, on average %.2f:", rounds,
           TREE_NODES, TREE_DEPTH, (double)accepted / (rounds ? rounds : 1));
    for (int i = 0; i <= TREE_DEPTH; i++) printf(" %d: %d%s", i, lengths[i], i < TREE_DEPTH ? "," : "\n");
    int same = 0;
    while (same < c.length && c.text[same] == greedy.text[same]) same++;
    session_destroy(&draft);
    session_destroy(&c.s);
    const bool has_ends = o->keys->is_preset || o->exact_last > 0;
    if (same < c.length && !has_ends) stop("speculate", "greedy decoding writes other bytes");
    if (same == c.length)
        puts("the same bytes as greedy decoding");
    else /* the newest positions of a guess are others than those of the text that it becomes */
        printf("the same bytes as greedy decoding up to %d of %d: a guess reads other positions as halves\n", same,
               c.length);
}

static void command_speculate(model *m, const options *o)
{
    conversation c;
    session draft;
    int rounds = 0, accepted = 0, end;
    if (o->tree) {
        command_speculate_tree(m, o);
        return;
    }
    conversation_start(&c, m, o);
    session_create(&draft, m, find_format("tq4"), find_format("tq4"), MAX_CONTEXT);
    prefill(&draft, c.text, c.length - 1);
    fwrite(c.text, 1, (size_t)c.length, stdout);
    for (end = c.length + o->n_bytes; c.length < end && c.length + PROPOSALS < MAX_CONTEXT; rounds++) {
        int before = c.length;
        accepted += speculate_round(&c, &draft);
        fwrite(c.text + before, 1, (size_t)((c.length < end ? c.length : end) - before), stdout);
        fflush(stdout);
    }
    fprintf(stderr, "\n%d calls verified what would have been %d; %d of %d proposals of the tq4 cache were accepted\n",
            rounds, c.length - end + o->n_bytes, accepted, rounds * PROPOSALS);
    putchar('\n');
    session_destroy(&draft);
    session_destroy(&c.s);
}

/* ---- command line ---- */

/* Without arguments: a short table and a paragraph. */
static void command_demo(model *m, const options *given)
{
    options o = *given;
    o.n_windows = 2;
    command_score(m, &o);
    o.prompt = "And it came to pass, that";
    o.keys = o.values = find_format("safe");
    o.n_bytes = 600;
    o.temperature = 0.6f;
    puts("\nWritten with the preset safe:");
    command_generate(m, &o);
    o.n_bytes = 100;
    puts("\nVerified trees of guesses:");
    command_speculate_tree(m, &o);
}

int main(int argc, char **argv)
{
    static const struct {
        const char *name;
        void (*run)(model *m, const options *o);
    } commands[] = {{"score", command_score},   {"generate", command_generate},   {"save", command_save},
                    {"resume", command_resume}, {"speculate", command_speculate}, {"demo", command_demo},
                    {"learn", command_learn}};
    options o = parse(argc, argv);
    for (size_t i = 0; i < sizeof commands / sizeof *commands; i++) {
        if (strcmp(o.command, commands[i].name) != 0) continue;
        model m;
        if (!model_load(&m, o.model_path, o.n_threads)) stop(o.model_path, "is no model, or damaged");
        m.exact_first = o.exact_first;
        m.exact_last = o.exact_last;
        m.batch = o.batch;
        if (o.profile && commands[i].run != command_learn) use_profile(&m, o.profile);
        commands[i].run(&m, &o);
        model_free(&m);
        return 0;
    }
    usage();
    return 2;
}
