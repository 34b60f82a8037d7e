// Adds a button that copies the text of an element with data-mq-copy, which names it.
"use strict";
{
    const copy = async (text) => {
        if (navigator.clipboard) {
            await navigator.clipboard.writeText(text);
            return;
        }
        // Without HTTPS there is no clipboard.
        const box = document.createElement("textarea");
        box.value = text;
        document.body.append(box);
        box.select();
        const copied = document.execCommand("copy");
        box.remove();
        if (!copied) {
            throw new Error("the browser does not copy");
        }
    };
    for (const source of document.querySelectorAll("[data-mq-copy]")) {
        const label = `Copy ${source.dataset.mqCopy}`;
        const button = document.createElement("button");
        const status = document.createElement("span"); // for screen readers: the button says it, too
        button.type = "button";
        button.className = "mq-copy";
        button.textContent = label;
        status.className = "mq-hidden";
        status.role = "status";
        button.addEventListener("click", async () => {
            try {
                await copy(source.textContent);
                button.textContent = "Copied";
            } catch {
                button.textContent = "Could not copy";
            }
            status.textContent = button.textContent;
            window.setTimeout(() => {
                button.textContent = label;
                status.textContent = "";
            }, 2000);
        });
        source.before(button, status);
    }
}
