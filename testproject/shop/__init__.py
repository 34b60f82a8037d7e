"""A small shop: clients order over HTTP, and handlers do everything that follows.

| module        | its thought                                                       |
|---------------|-------------------------------------------------------------------|
| `views.py`    | the storefront's API: an order and its message commit together     |
| `handlers.py` | what an order sets off: invoice, letter, statistics, warehouse      |
| `mailing.py`  | letters as files, and a mail server that fails as real ones do      |
| `models.py`   | what is kept                                                        |
| `demo/`       | `manage.py mq_demo`: the shop under load, and the count at the end  |
"""
