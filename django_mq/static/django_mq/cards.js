// Lists of the stock admin as cards on a phone: writes the heading of each column into its cells.
"use strict";
{
    const label = () => {
        const list = document.getElementById("result_list");
        // Themes that make cards of their own label the cells themselves.
        if (!list || list.querySelector("td[data-label]")) {
            return;
        }
        const heads = [...list.querySelectorAll("thead th")].map((head) => head.textContent.trim());
        for (const row of list.querySelectorAll("tbody tr")) {
            [...row.cells].forEach((cell, column) => {
                if (cell.tagName === "TD" && !cell.classList.contains("action-checkbox")) {
                    cell.dataset.label = heads[column];
                }
            });
        }
        list.classList.add("mq-cards");
    };
    label();
    document.addEventListener("mq-refreshed", label);
}
