/* Delays, loses or passes all messages to one of the mock's endpoints. mock_hinder, which tests find by name, takes the number
 * that the endpoint's address begins with. */
#ifndef TESTS_MOCK_WAYS_H
#define TESTS_MOCK_WAYS_H

enum mock_way {
    MOCK_OPEN,
    MOCK_STALLED, /* it stays under way */
    MOCK_CUT,     /* it fails */
    MOCK_HELD     /* the next one stays under way, what is posted after it does not */
};

#endif
