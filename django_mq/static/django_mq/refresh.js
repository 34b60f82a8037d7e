// Reads the live part of a page again every few seconds, while somebody looks at it.
"use strict";
{
    const chooser = document.querySelector("[data-mq-refresh]");
    const KEY = "django_mq.refresh";
    const live = () => document.getElementById("mq-live");
    const isBusy = () => document.hidden || live().contains(document.activeElement);
    let timer = null;

    const address = () => {
        const url = new URL(chooser.dataset.mqUrl || window.location.href, window.location.href);
        if (chooser.dataset.mqUrl) {
            url.search = window.location.search;
            url.searchParams.set("part", "live");
        }
        return url;
    };

    const show = (text) => {
        if (chooser.dataset.mqUrl) {
            const open = [...live().querySelectorAll("details[open]")].map((each) => each.id);
            live().innerHTML = text;
            for (const id of open) {
                document.getElementById(id)?.setAttribute("open", "");
            }
            return;
        }
        const fresh = new DOMParser().parseFromString(text, "text/html").getElementById("mq-live");
        if (fresh) {
            live().replaceWith(fresh);
            document.dispatchEvent(new Event("mq-refreshed"));
        }
    };

    const refresh = async() => {
        if (isBusy()) {
            return;
        }
        const response = await fetch(address(), {credentials: "same-origin"});
        if (!response.ok || response.redirected) {
            return; // logged out, or an error: the page keeps what it shows
        }
        const text = await response.text();
        if (Number(chooser.value) && !isBusy()) {
            show(text);
        }
    };

    // The next request begins only when this one has ended, however slow the server is.
    const wait = () => {
        window.clearTimeout(timer);
        const seconds = Number(chooser.value);
        if (seconds && !document.hidden) {
            timer = window.setTimeout(() => refresh().catch(() => {}).then(wait), seconds * 1000);
        }
    };

    const now = () => {
        window.clearTimeout(timer);
        if (Number(chooser.value) && !document.hidden) {
            refresh().catch(() => {}).then(wait);
        }
    };

    if (chooser) {
        chooser.closest("[hidden]").hidden = false;
        const kept = window.localStorage.getItem(KEY);
        chooser.value = kept ?? chooser.dataset.mqRefresh;
        if (!chooser.value) {
            chooser.value = chooser.dataset.mqRefresh;
        }
        chooser.addEventListener("change", () => {
            window.localStorage.setItem(KEY, chooser.value);
            now();
        });
        document.addEventListener("visibilitychange", now);
        wait();
    }
}
