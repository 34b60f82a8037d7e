"""A small shop: orders are placed over HTTP, everything that follows is done by handlers.

| module        | its thought                                                       |
|---------------|-------------------------------------------------------------------|
| `views.py`    | the storefront's API: an order and its message commit together     |
| `handlers.py` | what an order sets off: invoice, letter, statistics, warehouse      |
| `mailing.py`  | letters as files, and a mail server that fails as real ones do      |
| `models.py`   | what is kept                                                        |
| `demo/`       | `manage.py mq_demo`: the shop under load, and the count at the end  |
"""
