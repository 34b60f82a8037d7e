// Reads the page again every few seconds and puts in its live part, while somebody looks at it.
"use strict";
{
    const box = document.querySelector("[data-mq-refresh]");
    const KEY = "django_mq.refresh";
    const isBusy = () => document.hidden || document.querySelector("#mq-live :is(select, button, a):focus");

    const refresh = async() => {
        if (!box.checked || isBusy()) {
            return;
        }
        const response = await fetch(window.location.href, {credentials: "same-origin"});
        if (!response.ok || response.redirected) {
            return;
        }
        const page = new DOMParser().parseFromString(await response.text(), "text/html");
        const fresh = page.getElementById("mq-live");
        if (fresh && box.checked && !isBusy()) {
            document.getElementById("mq-live").replaceWith(fresh);
        }
    };

    const loop = async() => {
        // A server that is away is asked again later.
        await refresh().catch(() => {});
        window.setTimeout(loop, Number(box.dataset.mqRefresh) * 1000);
    };

    if (box) {
        box.closest("[hidden]").hidden = false;
        box.checked = window.localStorage.getItem(KEY) === "on";
        box.addEventListener("change", () => {
            window.localStorage.setItem(KEY, box.checked ? "on" : "off");
            refresh().catch(() => {});
        });
        window.setTimeout(loop, Number(box.dataset.mqRefresh) * 1000);
    }
}
