from django_mq.contrib.tasks import task


@task
def add(first: int, second: int) -> int:
    return first + second
