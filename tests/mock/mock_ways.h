/* Delays, loses or passes all messages to one of the mock's endpoints. Tests find mock_hinder by name; it takes the number
 * that the endpoint's address begins with. */
#ifndef TESTS_MOCK_WAYS_H
#define TESTS_MOCK_WAYS_H

enum mock_way {
    MOCK_OPEN,
    MOCK_STALLED, /* it never completes */
    MOCK_CUT,     /* it fails */
    MOCK_HELD     /* the next one does not complete, later ones do */
};

#endif
