"""The seeds of the package's advisory locks, which are held until the transaction ends.

A lock is `hashtextextended(name, seed)`: the seed keeps locks of the same name apart.

| seed         | name                         | until it is free, other sessions       | they  |
|--------------|------------------------------|----------------------------------------|-------|
| KEYED_CLAIM  | `queue handler key`          | do not claim from that line            | skip  |
| GATE         | `queue`                      | do not claim from that queue           | skip  |
| COMMIT_ORDER | `queue`, `queue handler key` | draw no id for a message of that line  | wait  |

Workers of two versions run side by side, so a seed is never changed.
"""

KEYED_CLAIM = 1
GATE = 2
COMMIT_ORDER = 7105
