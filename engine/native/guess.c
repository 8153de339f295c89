/* What a layer will probably route to. See engine/router_matrix.py. */
#include "core.h"

#include <math.h>

static float activated(float value, int activation, float most, float sum) {
    if (activation == UNARY) return 1 / (1 + expf(-value));
    return activation == SOFT_MAX ? expf(value - most) / sum : value;
}

static void rank(const struct router *router) {
    float *scores = router->product, most = -INFINITY, sum = 0;
    for (int i = 0; i < router->n_rows && router->bias; i++) scores[i] += router->bias[i];
    /* Without a selection bias, an activation does not change the order. */
    if (!router->selection_bias) return;
    for (int i = 0; i < router->n_rows; i++) most = scores[i] > most ? scores[i] : most;
    for (int i = 0; i < router->n_rows && router->activation == SOFT_MAX; i++) {
        sum += expf(scores[i] - most);
    }
    for (int i = 0; i < router->n_rows; i++) {
        scores[i] = activated(scores[i], router->activation, most, sum) + router->selection_bias[i];
    }
}

/* The `top_k` highest scores' rows, the highest first. */
static int likeliest(const struct router *router, int top_k, int32_t *named) {
    const float *scores = router->product;
    int n = 0;
    for (int row = 0; row < router->n_rows; row++) {
        if (n == top_k && !(scores[row] >= scores[named[n - 1]])) continue;
        int place = n < top_k ? n++ : n - 1;
        for (; place && scores[named[place - 1]] <= scores[row]; place--) {
            named[place] = named[place - 1];
        }
        named[place] = row;
    }
    return n;
}

/* How many of the named weigh more than the least share of all their weight, from the first. */
static int n_above(const struct router *router, const int32_t *named, int n, double least_share) {
    const float *scores = router->product;
    float weights[n > 0 ? n : 1], sum = 0;
    for (int i = 0; i < n; i++) {
        weights[i] = router->activation == UNARY ? activated(scores[named[i]], UNARY, 0, 1)
                                                 : expf(scores[named[i]] - scores[named[0]]);
        sum += weights[i];
    }
    int above = 0;
    for (int i = 0; i < n; i++) above += weights[i] >= (float)least_share * sum;
    return above;
}

/* Name what layer `index` will probably route to, the likeliest first. Returns how many. */
int guess(struct core *core, int index, void *input, int32_t *named) {
    struct router *router = &core->layers[index].router;
    const struct settings *settings = &core->settings;
    *router->vector = input;
    core->compute(router->graph, router->plan);
    rank(router);
    int n = likeliest(router, settings->top_k, named);
    if (settings->least_share > 0) n = n_above(router, named, n, settings->least_share);
    return n;
}
