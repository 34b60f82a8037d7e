from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("django_mq", "0004_history"),
    ]

    operations = [
        migrations.AddField(
            model_name="failedattempt",
            name="place",
            field=models.TextField(
                blank=True,
                db_default="",
                help_text="Module and function that failed; empty if no traceback shows it.",
                verbose_name="place",
            ),
        ),
        migrations.AddField(
            model_name="failedattempt",
            name="fingerprint",
            field=models.GeneratedField(
                db_persist=True,
                expression=models.Func(
                    "error_class",
                    "handler",
                    "place",
                    arg_joiner=" || chr(10) || ",
                    template="left(encode(sha256(decode(replace(%(expressions)s, '\\', '\\\\'), 'escape')), 'hex'), 16)",
                ),
                output_field=models.CharField(db_collation="C", max_length=16),
                verbose_name="fingerprint",
            ),
        ),
        migrations.AddIndex(
            model_name="failedattempt",
            index=models.Index(
                fields=["fingerprint", "queue", "ended_at"], name="mq_attempt_fingerprint"
            ),
        ),
    ]
