/* The nearest known name to one that is not known: for "did you mean". */
#ifndef CORE_NEAREST_H
#define CORE_NEAREST_H

/* Letters to insert, delete, change or swap with their neighbour (optimal string alignment). */
int edit_distance(const char *a, const char *b);
/* The name with the smallest distance (the first such), or one that the word begins or that begins
 * the word; NULL when none is near: farther than a third of the word's length. */
const char *nearest_name(const char *word, const char *const *names, int n);

#endif
