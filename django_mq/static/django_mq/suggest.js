// Offers paths of payloads and metadata in the search box, once somebody goes to it.
"use strict";
{
    const paths = document.querySelector("datalist[data-mq-url]");
    const box = document.querySelector("input[name=q]");
    const offer = async() => {
        const response = await fetch(paths.dataset.mqUrl, {credentials: "same-origin"});
        if (!response.ok || response.redirected) {
            return;
        }
        for (const path of (await response.json()).paths) {
            paths.append(new Option("", path));
        }
    };

    if (paths && box) {
        box.setAttribute("list", paths.id);
        box.addEventListener("focus", () => offer().catch(() => {}), {once: true});
    }
}
